"""Full tensors of experts: all of them, by their numbers, whatever ranks hold of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nxd_jax.checkpoint import placement
from nxd_jax.modules.moe.moe_parallel_layers import ExpertFusedColumnParallelLinear, ExpertFusedRowParallelLinear
from nxd_jax.parallel_layers.checkpointing import get_sharded_model_dict
from nxd_jax.utils.full_weights import cut_full, gather_full, scatter_full
from tests.nxd_jax.conftest import Nxd
from torch_bridge.recorder import sharded

WORLDS = [(8, 2, 2), (4, 1, 4), (4, 2, 2), (1, 1, 1)]
HELD = {1: [[2, 0, 1, 3]], 2: [[2, 0], [1, 3]], 4: [[2], [0], [1], [3]]}


def layers(ep: int, ordered: bool) -> dict[str, Any]:
    torch.manual_seed(3)
    how: dict[str, Any] = {"bias": True, "keep_master_weight": True, "expert_distribution": HELD[ep] if ordered and ep > 1 else None}
    found: dict[str, Any] = {
        "gate_up": ExpertFusedColumnParallelLinear(4, 6, 8, stride=2, **how),
        "down": ExpertFusedRowParallelLinear(4, 4, 6, **how),
    }
    return {name: layer.to("xla") for name, layer in found.items()}


@pytest.mark.core(keep=3)
@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("world, tp, ep", WORLDS)
def test_there_and_back(nxd: Nxd, world: int, tp: int, ep: int, ordered: bool) -> None:
    nxd(world, tp=tp, ep=ep)
    for layer in layers(ep, ordered).values():
        assert torch.equal(gather_full(layer.weight), layer.master_weight)  # type: ignore[arg-type]
        assert torch.equal(gather_full(layer.weight, rank=world - 1), layer.master_weight)  # type: ignore[arg-type]
        for p in (layer.weight, layer.bias):
            before, full = sharded.varying(p), torch.randn(gather_full(p).shape)  # type: ignore[union-attr]
            scatter_full(p, full)
            assert torch.equal(gather_full(p), full) and sharded.varying(p) == before  # type: ignore[arg-type]
            shards = sharded.shards(p.detach())
            assert all(torch.equal(shards[r], cut_full(p, full, r)) for r in range(world))


def test_a_full_state_dict_is_cut(nxd: Nxd) -> None:
    """`get_sharded_model_dict` and `load_state_dict`."""
    nxd(4, tp=2, ep=2)
    model = torch.nn.ModuleDict(layers(2, ordered=True))
    full = {name: torch.randn(gather_full(p).shape) for name, p in model.named_parameters()}  # type: ignore[union-attr]
    model.load_state_dict(get_sharded_model_dict(model, full))
    assert all(torch.equal(gather_full(p), full[name]) for name, p in model.named_parameters())  # type: ignore[arg-type]


def test_what_is_refused(nxd: Nxd) -> None:
    nxd(4, tp=2, ep=2)
    weight = layers(2, ordered=False)["down"].weight
    with pytest.raises(
        ValueError, match=r"is of 4 experts that 2 expert parallel ranks share out, its full value has shape \[2, 4, 6\]: dim 0 must be the"
    ):
        scatter_full(weight, torch.zeros(2, 4, 6))
    with pytest.raises(ValueError, match="of experts takes one tensor, got 2"):
        scatter_full(weight, (torch.zeros(4, 4, 6), torch.zeros(4, 4, 6)))
    plain = torch.nn.Parameter(torch.zeros(2, 3))
    plain.expert_model_parallel = True  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match="that expert parallel ranks share out is on cpu, and this process hosts several of them"):
        scatter_full(plain, torch.zeros(4, 3))
    fused = torch.nn.Parameter(torch.zeros(2, 3))
    for name, value in {
        "expert_model_parallel": True,
        "tensor_model_parallel": True,
        "partition_dim": 0,
        "partition_stride": 2,
        "num_partitions": 2,
    }.items():
        setattr(fused, name, value)
    with pytest.raises(
        ValueError, match="is of experts, and tensor-parallel ranks share out several tensors fused along its dim 0, which counts experts"
    ):
        placement.of(fused)
