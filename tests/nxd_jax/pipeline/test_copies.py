"""`copy.deepcopy` of a model in a pipeline (an average of weights, a reference model): a pipeline of its own, with the same weights."""

from __future__ import annotations

import copy
import math
from typing import Any

import neuronx_distributed as nxd_api
import pytest
import torch
from neuronx_distributed.pipeline import NxDPPModel
from torch import nn

from tests.nxd_jax.conftest import Nxd
from tests.nxd_jax.pipeline.models import Layer
from torch_bridge.recorder import placed


class Tied(nn.Module):
    """A head that is the embedding. refused: with a branch that symbolic tracing does not take."""

    def __init__(self, refused: bool = False) -> None:
        super().__init__()
        self.refused = refused
        self.embedding = nn.Embedding(8, 4)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        if self.refused and int(x.shape[1]) > 0:
            x = x * math.sqrt(4.0)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


PIPELINE = {
    "transformer_layer_cls": Layer,
    "num_microbatches": 2,
    "output_loss_value_spec": True,
    "input_names": ["ids", "labels"],
    "auto_partition": True,
    "autowrap_modules": [math],
    "broadcast_and_average_loss": True,
}


def check(model: Any, batch: dict[str, Any], parameters: Any) -> None:
    """A copy computes the same, on the same cores, with weights of its own, and learns."""
    model.run_train(**batch)
    other = copy.deepcopy(model)
    mine, its = parameters(model), parameters(other)
    assert list(mine) == list(its)
    for name, p in mine.items():
        assert its[name] is not p and placed.place_of(its[name]) == placed.place_of(p)
        assert torch.equal(its[name].detach().cpu(), p.detach().cpu()) and its[name].grad is None, name  # as torch's copies of parameters
    found = model.run_eval(**batch).item()
    assert other.run_eval(**batch).item() == found
    with torch.no_grad():
        for p in mine.values():
            p.mul_(0.5)
    assert model.run_eval(**batch).item() != found == other.run_eval(**batch).item()
    other.run_train(**batch)
    for name, p in its.items():
        torch.testing.assert_close(p.grad.cpu(), mine[name].grad.cpu(), msg=name)


@pytest.mark.core(keep=1)
@pytest.mark.parametrize("refused", [True, False])
def test_a_traced_model(nxd: Nxd, refused: bool) -> None:
    """Tied: the second stage has a copy of the embedding. The configuration names a Python module, which cannot be copied."""
    nxd(2, pp=2)
    torch.manual_seed(0)
    config = nxd_api.neuronx_distributed_config(pipeline_parallel_size=2, pipeline_config=PIPELINE)
    model = nxd_api.initialize_parallel_model(config, lambda: Tied(refused))
    assert model.pipeline._tracer.by_running == refused
    batch = {name: torch.randint(0, 8, (4, 3)) for name in ("ids", "labels")}
    check(model, batch, lambda m: dict(m.named_parameters()))
    other = copy.deepcopy(model)
    assert other.module is other.pipeline.original_torch_module is not model.module and other.nxd_config is model.nxd_config
    assert other.module.head.weight is other.module.embedding.weight


def test_a_list_of_layers(nxd: Nxd) -> None:
    class Linear(nn.Linear):
        def forward(self, x: Any) -> Any:
            return super().forward(x[0] if isinstance(x, (list, tuple)) else x)

    nxd(2, pp=2)
    torch.manual_seed(0)
    model = NxDPPModel(
        [Linear(4, 4) for _ in range(3)],
        num_microbatches=2,
        manual_pp_partition=True,
        manual_pp_loss_fn=nn.functional.mse_loss,
        broadcast_and_average_loss=True,
    )
    check(model, {"inputs": torch.randn(4, 4), "labels": torch.randn(4, 4)}, lambda m: dict(m.local_named_parameters()))


def test_not_in_several_processes(nxd: Nxd) -> None:
    nxd(2, pp=2)
    model = NxDPPModel(Tied(), **PIPELINE)  # type: ignore[arg-type]
    model._exchange = object()  # type: ignore[assignment]
    with pytest.raises(
        NotImplementedError, match=r"one of several processes: .* model.local_state_dict\(\).items\(\)}, or start the script with nxd-run"
    ):
        copy.deepcopy(model)
