"""Parameters and buffers that a model reads between its layers: they lie and train on the stage that reads them, by every schedule."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from neuronx_distributed.pipeline import NxDPPModel
from torch import nn

from tests.nxd_jax.conftest import Nxd
from tests.nxd_jax.pipeline.models import HIDDEN, WORDS, Block
from torch_bridge.recorder import placed


class Scale(nn.Module):
    """No leaf of the tracer: its weight is read in the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, HIDDEN))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


class Reader(nn.Module):
    """Reads parameters of its own, of a child and of its embedding, and a buffer, before and after its layers. by_running: Python looks at a shape."""

    shift: torch.Tensor

    def __init__(self, by_running: bool = False) -> None:
        super().__init__()
        self.by_running = by_running
        self.embedding = nn.Embedding(WORDS, HIDDEN)
        self.places = nn.Parameter(torch.randn(4, HIDDEN))
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.scale = Scale()
        self.gain = nn.Parameter(torch.ones(WORDS))
        self.register_buffer("shift", torch.linspace(-1, 1, WORDS))

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids) + self.places
        if self.by_running and ids.shape[1] > 100:
            x = -x
        for layer in self.layers:
            x = layer(x)
        x = nn.functional.linear(self.scale(x), self.embedding.weight) * self.gain + self.shift
        return nn.functional.cross_entropy(x.flatten(0, 1), labels.flatten())


def batch() -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    return {name: torch.randint(0, WORDS, (4, 4), generator=draw) for name in ("ids", "labels")}


def made(by_running: bool, **options: Any) -> tuple[Any, NxDPPModel]:
    torch.manual_seed(0)
    model = Reader(by_running)
    chosen = {"transformer_layer_cls": Block, "num_microbatches": 4, "output_loss_value_spec": True, "input_names": ["ids", "labels"]}
    return model, NxDPPModel(model, auto_partition=True, **{**chosen, **options})


@pytest.mark.thorough(keep=2)
@pytest.mark.parametrize(("by_running", "schedule"), [(False, "1f1b"), (False, "zb_h1"), (True, "zb_h1"), (True, "1f1b")])
def test_gradients(nxd: Nxd, by_running: bool, schedule: str) -> None:
    """The loss and every gradient are those of the whole model; a module's tensors lie with the first stage that reads one of them."""
    nxd(1)
    torch.manual_seed(0)
    whole = Reader(by_running).to("xla")
    loss = whole(**{name: t.to("xla") for name, t in batch().items()})
    loss.backward()
    expected = {name: p.grad.cpu() for name, p in whole.named_parameters()}

    nxd(2, pp=2)
    model, pipeline = made(by_running, schedule=schedule)
    torch.testing.assert_close(pipeline.run_train(**batch()), loss.detach().cpu())
    for name, p in model.named_parameters():
        assert p.grad is not None, name
        torch.testing.assert_close(p.grad.cpu(), expected[name], rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
    homes = {name: getattr(placed.place_of(p), "name", None) for name, p in model.named_parameters() if "layers" not in name}
    assert homes == {"embedding.weight": "pp 0", "places": "pp 0", "scale.weight": "pp 1", "gain": "pp 0"}


def test_new_values(nxd: Nxd) -> None:
    """Stages read what the model has now: another buffer, other values of a parameter."""
    nxd(2, pp=2)
    model, pipeline = made(False)
    before = pipeline.run_eval(**batch())
    model.shift = torch.zeros(WORDS).to("xla")
    with torch.no_grad():
        model.gain.mul_(2)
        model.scale.weight.mul_(3)
        alone = Reader()
        alone.load_state_dict({name: t.cpu() for name, t in model.state_dict().items()})
        expected = alone(**batch())
    found = pipeline.run_eval(**batch())
    assert abs(found - before) > 0.01
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
