"""Parameters and buffers that a model reads between its layers: they lie and train on the stage that reads them, by every schedule."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from neuronx_distributed.pipeline import NxDPPModel
from torch import nn

from tests.nxd_jax.conftest import Nxd
from tests.nxd_jax.pipeline.models import HIDDEN, WORDS, Block, Layer
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


class Stateful(nn.Module):
    """Computes with its buffers alone, and updates one in each stage. by_running: Python looks at a shape."""

    table: torch.Tensor
    steps: torch.Tensor
    mean: torch.Tensor

    def __init__(self, by_running: bool = False) -> None:
        super().__init__()
        self.by_running = by_running
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.register_buffer("table", torch.linspace(0, 1, 4))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.by_running and x.shape[0] > 100:
            x = -x
        scale, mean = 1 - 0.5 * self.table, self.mean
        self.count()
        for layer in self.layers:
            x = layer(x)
        mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return (x * scale).square().mean()

    def count(self) -> None:
        self.steps += 1


class Assigning(Stateful):
    def count(self) -> None:
        self.steps = self.steps + 1


class WritingAnothers(Stateful):
    """Reads in the first stage what the last one writes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + self.mean)


def stateful(model: Stateful) -> NxDPPModel:
    return NxDPPModel(
        model, Layer, num_microbatches=2, output_loss_value_spec=True, input_names=["x"], auto_partition=True, return_loss_on_cpu=True
    )


@pytest.mark.parametrize("by_running", [False, True])
def test_buffers_that_are_computed_with_and_updated(nxd: Nxd, by_running: bool) -> None:
    """Their values are those of each micro-batch, not those of the time at which the model was traced."""
    nxd(2, pp=2)
    torch.manual_seed(0)
    alone = Stateful(by_running)
    torch.manual_seed(0)
    model = Stateful(by_running)
    pipeline = stateful(model)
    x = torch.randn(6, 4)
    for table in (alone.table, torch.full((4,), 3.0)):
        alone.table.copy_(table)
        model.table.copy_(table)
        expected = [float(alone(part).detach()) for part in x.chunk(2)]
        assert float(pipeline.run_train(x=x)) == pytest.approx(sum(expected) / 2, rel=1e-5)
    for (name, found), buffer in zip(model.named_buffers(), alone.buffers(), strict=True):
        torch.testing.assert_close(found.cpu(), buffer, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("by_running", [False, True])
@pytest.mark.parametrize(
    ("model", "text"),
    [
        (Assigning, r"its forward assigns the buffer steps anew, .*: write it in place \(self.steps.copy_\(...\)\)"),
        (WritingAnothers, r"stage 1 of the pipeline writes a tensor in place \(mul_\w*\) that stage 0"),
    ],
)
def test_buffers_that_cannot_be_updated(nxd: Nxd, model: type[Stateful], by_running: bool, text: str) -> None:
    """The model's own stay as they are."""
    nxd(2, pp=2)
    made = model(by_running)
    with pytest.raises(RuntimeError, match=text):
        stateful(made).run_train(x=torch.ones(4, 4))
    assert int(made.steps) == 0 and torch.equal(made.mean.cpu(), torch.zeros(4))


class Making(Stateful):
    """Makes tensors of nothing: a constant, and noise on the CPU."""

    def __init__(self, noise: float) -> None:
        super().__init__()
        self.noise = noise

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = torch.tensor([1.0, 2.0, 3.0, 4.0])
        if self.noise:
            made = made + self.noise * torch.randn(4)
        for layer in self.layers:
            x = layer(x)
        return (x * made.to(x.device)).square().mean()


def test_constants_of_a_forward(nxd: Nxd) -> None:
    """They are right, and the model does not keep them."""
    nxd(2, pp=2)
    model = Making(0.0)
    expected = float(model(torch.ones(4, 4)).detach())
    assert float(stateful(model).run_train(x=torch.ones(4, 4))) == pytest.approx(expected, rel=1e-5)
    assert not any(isinstance(value, torch.Tensor) for value in model.__dict__.values())


def test_random_tensors_of_a_forward_are_new_in_every_step(nxd: Nxd) -> None:
    """Tracing draws none."""
    nxd(2, pp=2)
    model = Making(1.0)
    state = torch.get_rng_state()
    pipeline = stateful(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert len({round(float(pipeline.run_eval(x=torch.ones(4, 4))), 6) for _ in range(3)}) == 3
