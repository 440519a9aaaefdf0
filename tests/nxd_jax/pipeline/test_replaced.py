"""Layers and weights that a script replaces, ties and unties between steps of a pipeline: eager torch's numbers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from neuronx_distributed.pipeline import NxDPPModel
from torch import nn

from nxd_jax.pipeline import weights
from nxd_jax.pipeline.elsewhere import Elsewhere
from nxd_jax.pipeline.runtime import Replica
from nxd_jax.pipeline.traced_stages import TracedStages
from tests.nxd_jax.conftest import Nxd
from tests.nxd_jax.pipeline.models import Layer


class Model(nn.Module):
    """A small language model. scale: read between the layers of both stages."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 4)
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.scale = nn.Parameter(torch.ones(4))
        self.head = nn.Linear(4, 8, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x) * self.scale
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


def _new(shape: tuple[int, ...], model: Any) -> nn.Parameter:
    t = torch.randn(shape, generator=torch.Generator().manual_seed(4))
    return nn.Parameter(t.to(next(model.parameters()).device))


def _restored(elsewhere: Elsewhere) -> None:
    """As at the start of a step."""
    with elsewhere.present():
        pass


def _untie(model: Any) -> None:
    model.head.weight = nn.Parameter(model.embedding.weight.detach().clone())


def _tie(model: Any) -> None:
    model.head.weight = model.embedding.weight


def _scale(model: Any) -> None:
    model.scale = _new((4,), model)


def _layer(model: Any) -> None:
    new = Layer()
    new.linear.weight, new.linear.bias = _new((4, 4), model), _new((4,), model)
    model.layers[2] = new


def _identity(model: Any) -> None:
    model.layers[0] = nn.Identity()


def _assign(model: Any) -> None:
    state = {name: (1.5 * t.detach().cpu()).to(model.head.weight.device) for name, t in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


@pytest.mark.core(keep=2)
@pytest.mark.parametrize(
    ("change", "tied"), [(_untie, True), (_layer, False), (_tie, False), (_scale, False), (_identity, True), (_assign, True)]
)
def test_what_is_replaced_between_steps(nxd: Nxd, change: Callable[[Any], None], tied: bool) -> None:
    nxd(2, pp=2)
    torch.manual_seed(0)
    eager = Model(tied)
    model = copy.deepcopy(eager)
    pipeline = NxDPPModel(model, Layer, 4, output_loss_value_spec=True, input_names=["ids"], auto_partition=True)
    ids = torch.randint(0, 8, (4, 3), generator=torch.Generator().manual_seed(1))
    for step in range(4):
        if step == 2:
            change(eager)
            change(model)
        losses = [eager(part) for part in ids.chunk(4)]
        loss = torch.stack(losses).mean()
        loss.backward()
        assert float(pipeline.run_train(ids=ids)) == pytest.approx(float(loss.detach()), rel=1e-5)
        for (name, one), other in zip(eager.named_parameters(), pipeline.parameters(), strict=True):
            torch.testing.assert_close(other.grad.cpu(), one.grad, rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
        with torch.no_grad():
            for p in (*eager.parameters(), *pipeline.parameters()):
                p.sub_(p.grad, alpha=0.1)
                p.grad = None


def test_one_of_several_processes_refuses(nxd: Nxd, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others would not know of it."""
    nxd(2, pp=2)
    model = Model(tied=True)
    pipeline: Any = NxDPPModel(model, Layer, 4, output_loss_value_spec=True, input_names=["ids"], auto_partition=True)
    ids = torch.zeros(4, 3, dtype=torch.long)
    pipeline.run_train(ids=ids)
    found = pipeline._stages({"ids": ids})
    here = [False, True]
    assert not weights.are_others(found, here, pipeline._elsewhere)
    (replica,) = [r for held in found.replicas for r in held if isinstance(r, Replica) and r.name == "embedding.weight"]
    assert replica.reader == 1
    _untie(model)
    assert weights.are_others(found, here, pipeline._elsewhere)
    _tie(model)
    assert not weights.are_others(found, here, pipeline._elsewhere)
    pipeline._elsewhere.take_out(model, found, {id(model.embedding.weight)}.__contains__)  # as in the process of the second stage
    _restored(pipeline._elsewhere)
    assert not weights.are_others(found, here, pipeline._elsewhere)
    model.head.weight = _new((8, 4), model.layers[0].linear)
    _restored(pipeline._elsewhere)
    assert weights.are_others(found, here, pipeline._elsewhere)
    monkeypatch.setattr(type(pipeline), "_here", here)
    with pytest.raises(RuntimeError, match="replaced, tied or untied since they were cut"):
        pipeline._place_anew(found)
    _layer(model)
    tracer: TracedStages = pipeline._tracer
    with pytest.raises(RuntimeError, match="layers of Model have been replaced since it was cut"):
        tracer.of({"ids": ids}, lambda _: None, alone=False)
