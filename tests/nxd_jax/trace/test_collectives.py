"""Collectives of traced models: on a device for each rank, and on one device as batched ones, against numpy's formulas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch_xla.core.xla_model as xm

from nxd_jax.parallel_layers import mappings, parallel_state
from nxd_jax.trace.model_builder_v2 import ModelBuilder
from nxd_jax.trace.nxd_model import NxDModel
from nxd_jax.trace.parallel_context import NxDParallelState
from tests.nxd_jax.trace import nets

WORLD, TP = 4, 2
XS = [torch.arange(8.0).view(4, 2) * (r + 1) + r for r in range(WORLD)]
TP_GROUPS = [[0, 1], [2, 3]]
DP_GROUPS = [[0, 2], [1, 3]]


def of(rank: int, groups: list[list[int]]) -> list[torch.Tensor]:
    return [XS[r] for r in next(g for g in groups if rank in g)]


def place(rank: int, groups: list[list[int]]) -> int:
    return next(g.index(rank) for g in groups if rank in g)


def dp_sum(x: torch.Tensor) -> torch.Tensor:
    y = x + 0
    dist.all_reduce(y, group=parallel_state.get_data_parallel_group())
    return y


def tp_gathered(x: torch.Tensor) -> torch.Tensor:
    parts = [torch.zeros_like(x) for _ in range(TP)]
    dist.all_gather(parts, x, group=parallel_state.get_tensor_model_parallel_group())
    return torch.cat(parts, 1)


ALL = [[0, 1, 2, 3]]
CASES: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], Callable[[int], torch.Tensor]]] = {
    "all reduce": (lambda x: xm.all_reduce("sum", x), lambda r: sum(XS)),  # type: ignore[dict-item, return-value]
    "largest": (lambda x: xm.all_reduce("max", x), lambda r: torch.stack(XS).amax(0)),
    "mean of groups": (lambda x: xm.all_reduce("sum", x, scale=0.5, groups=DP_GROUPS), lambda r: sum(of(r, DP_GROUPS)) * 0.5),  # type: ignore[dict-item, return-value]
    "all gather": (lambda x: xm.all_gather(x, dim=0), lambda r: torch.cat(XS)),
    "gather of groups": (lambda x: xm.all_gather(x, dim=1, groups=DP_GROUPS), lambda r: torch.cat(of(r, DP_GROUPS), 1)),
    "reduce scatter": (
        lambda x: xm.reduce_scatter("sum", x, scale=1.0, scatter_dim=0, shard_count=WORLD),
        lambda r: sum(XS).chunk(WORLD)[r],  # type: ignore[union-attr]
    ),
    "scatter of groups": (
        lambda x: xm.reduce_scatter("sum", x, scale=1.0, scatter_dim=0, shard_count=2, groups=TP_GROUPS),
        lambda r: sum(of(r, TP_GROUPS)).chunk(2)[place(r, TP_GROUPS)],  # type: ignore[union-attr]
    ),
    "all to all": (
        lambda x: xm.all_to_all(x, split_dimension=0, concat_dimension=1, split_count=WORLD),
        lambda r: torch.cat([x.chunk(WORLD)[r] for x in XS], 1),
    ),
    "permute": (lambda x: xm.collective_permute(x, [[r, (r + 1) % WORLD] for r in range(WORLD)]), lambda r: XS[(r - 1) % WORLD]),
    "to the region": (lambda x: mappings.reduce_from_tensor_model_parallel_region(x + 0), lambda r: sum(of(r, TP_GROUPS))),  # type: ignore[dict-item, return-value]
    "own columns": (
        lambda x: mappings.scatter_to_tensor_model_parallel_region(x),
        lambda r: XS[r].chunk(TP, 1)[place(r, TP_GROUPS)],
    ),
    "columns of all": (lambda x: mappings.gather_from_tensor_model_parallel_region(x), lambda r: torch.cat(of(r, TP_GROUPS), 1)),
    "sequence": (
        lambda x: mappings.gather_from_sequence_parallel_region(x, to_model_parallel=False),
        lambda r: torch.cat(of(r, TP_GROUPS)),
    ),
    "a group of data": (dp_sum, lambda r: sum(of(r, DP_GROUPS))),  # type: ignore[dict-item, return-value]
    "a list": (tp_gathered, lambda r: torch.cat(of(r, TP_GROUPS), 1)),
}


ON_A_DEVICE_EACH = ("all gather", "reduce scatter", "permute")
"""JAX batches them along one axis only, and a world of 4 with tensor parallel size 2 has two."""


def traced(names: list[str], tp: int = TP) -> NxDModel:
    def every(x: torch.Tensor) -> Any:
        return [CASES[name][0](x) for name in names]

    with NxDParallelState(world_size=WORLD, tensor_model_parallel_size=tp):
        return ModelBuilder(every).trace(XS[0], tag="all").compile()


@pytest.mark.parametrize(
    ("form", "tp", "names"),
    [
        ("mesh", TP, list(CASES)),
        ("one", TP, [n for n in CASES if n not in ON_A_DEVICE_EACH]),
        ("one", WORLD, ["all reduce", "largest", "all to all", "all gather", "reduce scatter"]),
    ],
)
def test_collectives(form: str, tp: int, names: list[str]) -> None:
    model = traced(names, tp)
    nets.put_on(model, form)
    model.to_neuron()
    found = model(XS, forward_mode="ranked_to_cpu")
    for name, of_ranks in zip(names, found, strict=True):
        for rank, got in enumerate(of_ranks):
            torch.testing.assert_close(got, CASES[name][1](rank), msg=lambda text, n=name, r=rank: f"{n}, rank {r}: {text}")


@pytest.mark.core(keep=1)
@pytest.mark.parametrize("name", ON_A_DEVICE_EACH)
def test_what_needs_a_device_for_each_rank(name: str) -> None:
    forms = traced([name])._model.programs["all"].forms
    assert forms.get("one") is None
    assert set(forms.serialized) == {"mesh"} and forms.missing["one"].startswith("a collective cannot run as a batched one: ")


def test_a_state_that_begins_with_values_of_its_own_on_each_rank() -> None:
    """Only zeros, or what all ranks have, can be a state's beginning."""
    from nxd_jax.parallel_layers import layers

    class Updates(layers.ColumnParallelLinear):
        def forward(self, x: torch.Tensor) -> Any:  # type: ignore[override]
            self.weight.add_(1)
            return x @ self.weight.t()

    with NxDParallelState(world_size=2, tensor_model_parallel_size=2):
        module = Updates(2, 4, bias=False)
        with pytest.raises(
            RuntimeError,
            match=r"weight is updated by the forward and begins with values that differ by rank: a state begins with zeros, or",
        ):
            ModelBuilder(module).trace(XS[0])
        with torch.no_grad():
            module.weight.zero_()
        model = ModelBuilder(module).trace(XS[0]).compile()
    model.to_neuron()
    assert model(XS[0]).tolist() == [[float(row.sum())] * 2 for row in XS[0]]
