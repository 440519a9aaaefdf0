"""Weights of parallel layers drawn anew in a process that hosts several ranks: from the CPU's random state until the model is moved."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from nxd_jax.modules.qkv_linear import GQAQKVColumnParallelLinear
from nxd_jax.parallel_layers import ColumnParallelLinear, ParallelEmbedding, RowParallelLinear
from tests.nxd_jax.conftest import Nxd
from torch_bridge.mesh import world
from torch_bridge.recorder import sharded


def drawn(weight: torch.Tensor, seed: int = 5) -> list[torch.Tensor]:
    torch.manual_seed(seed)
    weight.data.normal_(std=0.5)
    return sharded.shards(weight.detach())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_before_the_model_moves(nxd: Nxd, dtype: torch.dtype) -> None:
    nxd(4, tp=2)
    weight = ColumnParallelLinear(4, 8, dtype=dtype).weight
    torch.manual_seed(5)
    expected = torch.empty(4, 4, dtype=dtype).normal_(std=0.5)
    assert all(torch.equal(part, expected) for part in drawn(weight))
    assert sharded.varying(weight).axes == ("tp",)  # it may differ again


def test_a_slice_of_a_weight(nxd: Nxd) -> None:
    nxd(2, tp=2)
    weight = GQAQKVColumnParallelLinear(4, [8, 4], bias=False, kv_size_multiplier=2, fuse_qkv=True).weight_qkv
    before = sharded.shards(weight.detach().clone())
    torch.manual_seed(5)
    expected = torch.empty(4).uniform_()
    torch.manual_seed(5)
    weight.data[1].uniform_()
    for old, new in zip(before, sharded.shards(weight.detach()), strict=True):
        assert torch.equal(new[1], expected) and torch.equal(new[2:], old[2:])


def test_after_it_has_moved(nxd: Nxd) -> None:
    nxd(2, tp=2)
    layer = ColumnParallelLinear(4, 8)
    on_cpu = drawn(layer.weight)
    layer.double().float()  # stays on the CPU in a process of its own
    assert torch.equal(drawn(layer.weight)[0], on_cpu[0])
    layer.to("xla")
    on_device = drawn(layer.weight)
    assert not torch.equal(on_device[0], on_cpu[0]) and torch.equal(on_device[0], on_device[1])


def test_a_layer_made_on_the_device(nxd: Nxd) -> None:
    nxd(2, tp=2)
    weight = ColumnParallelLinear(4, 8, device="xla").weight
    torch.manual_seed(5)
    assert not torch.equal(drawn(weight)[0], torch.empty(4, 4).normal_(std=0.5))


def test_seeds_that_differ_by_rank(nxd: Nxd) -> None:
    nxd(4, tp=4)
    weight = ColumnParallelLinear(4, 16).weight

    def alone(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return torch.empty(4, 4).normal_(std=0.5)

    each, along_tp, same = drawn(weight, 5 + world.rank()), drawn(weight, 5 + world.current().table(lambda r: r % 2)), drawn(weight, 5)
    assert sharded.varying(weight).axes == ("tp",)
    for rank in range(4):
        assert torch.equal(each[rank], alone(5 + rank)) and torch.equal(along_tp[rank], alone(5 + rank % 2))
        assert torch.equal(same[rank], alone(5))
    own = torch.Generator().manual_seed(7 + world.rank())
    weight.data.normal_(std=0.5, generator=own)
    weight.data[1].zero_().uniform_(generator=own)
    for rank, part in enumerate(sharded.shards(weight.detach())):
        twin = torch.Generator().manual_seed(7 + rank)
        expected = torch.empty(4, 4).normal_(std=0.5, generator=twin)
        expected[1].uniform_(generator=twin)
        assert torch.equal(part, expected)


def test_seeds_that_differ_among_data_parallel_ranks(nxd: Nxd) -> None:
    """Each draws what it would alone, and the copies of the weight differ from then on: as under torchrun."""
    nxd(4, tp=2)
    weight = ColumnParallelLinear(4, 8).weight
    found = drawn(weight, 5 + world.rank())
    assert sharded.varying(weight).axes == ("dp", "tp")
    for rank in range(4):
        torch.manual_seed(5 + rank)
        assert torch.equal(found[rank], torch.empty(4, 4).normal_(std=0.5))
    torch.manual_seed(0)


LAYERS: dict[str, Callable[[str], torch.nn.Module]] = {
    "column": lambda device: ColumnParallelLinear(4, 8, device=device),
    "row": lambda device: RowParallelLinear(8, 4, device=device),
    "embedding": lambda device: ParallelEmbedding(16, 4, device=device),
    "fused": lambda device: GQAQKVColumnParallelLinear(8, [8, 8], bias=False, fuse_qkv=True, device=device),
}


def weight_parts(layer: torch.nn.Module) -> list[torch.Tensor]:
    weight = next(layer.to("xla").parameters())
    return sharded.shards(weight.detach())


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("device", ["cpu", "xla"])
def test_layers_made_after_seeds_that_differ_by_rank(nxd: Nxd, device: str, tp: int) -> None:
    """Each rank has its part of the full weight that it would draw alone."""
    nxd(4, tp=tp)
    for name, make in LAYERS.items():
        torch.manual_seed(5 + world.rank())
        found = weight_parts(make(device))
        for rank in range(4):
            torch.manual_seed(5 + rank)
            assert torch.equal(found[rank], weight_parts(make(device))[rank]), (name, rank)
