"""Every region forward and backward, with different tensors and gradients on every rank."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch

from nxd_jax.parallel_layers import comm, mappings, parallel_state
from tests.nxd_jax.conftest import Nxd
from tests.nxd_jax.parallel_layers.parts import close, own, per_rank, tp_groups, tp_place

Values = list[torch.Tensor]
SHAPE = (8, 2, 4)
WORLD, TP = 8, 4


def members(rank: int) -> list[int]:
    return next(g for g in tp_groups() if rank in g)


def total(values: Values, rank: int) -> torch.Tensor:
    return sum((values[r] for r in members(rank)), start=torch.zeros(()))


def gathered(values: Values, rank: int, dim: int) -> torch.Tensor:
    return torch.cat([values[r] for r in members(rank)], dim)


def part(x: torch.Tensor, rank: int, dim: int) -> torch.Tensor:
    return x.chunk(TP, dim)[tp_place(rank)]


Rule = Callable[[Values, int], torch.Tensor]


def same(values: Values, rank: int) -> torch.Tensor:
    return values[rank]


def gather(dim: int) -> Rule:
    return lambda values, rank: gathered(values, rank, dim)


def split(dim: int) -> Rule:
    return lambda values, rank: part(values[rank], rank, dim)


def reduce_scatter(dim: int) -> Rule:
    return lambda values, rank: part(total(values, rank), rank, dim)


REGIONS = {
    "copy_to": (mappings.copy_to_tensor_model_parallel_region, same, total),
    "reduce_from": (mappings.reduce_from_tensor_model_parallel_region, total, same),
    "scatter_to": (mappings.scatter_to_tensor_model_parallel_region, split(-1), gather(-1)),
    "gather_from": (mappings.gather_from_tensor_model_parallel_region, gather(-1), split(-1)),
    "gather_from_with_dim": (
        functools.partial(mappings.gather_from_tensor_model_parallel_region_with_dim, gather_dim=1),
        gather(1),
        split(1),
    ),
    "reduce_scatter_with_dim": (
        functools.partial(mappings.reduce_scatter_to_tensor_model_parallel_region_with_dim, partition_dim=2),
        reduce_scatter(2),
        gather(2),
    ),
    "scatter_channels": (mappings.scatter_input_channels_to_tensor_model_parallel_region, split(-3), gather(-3)),
    "scatter_sequence": (mappings.scatter_to_sequence_parallel_region, split(0), gather(0)),
    "scatter_sequence_2": (functools.partial(mappings.scatter_to_sequence_parallel_region, sequence_dimension=2), split(2), gather(2)),
    "gather_sequence": (mappings.gather_from_sequence_parallel_region, gather(0), reduce_scatter(0)),
    "gather_sequence_1": (
        functools.partial(mappings.gather_from_sequence_parallel_region, sequence_dimension=1),
        gather(1),
        reduce_scatter(1),
    ),
    "gather_sequence_split": (
        functools.partial(mappings.gather_from_sequence_parallel_region, to_model_parallel=False, tile_cc=True),
        gather(0),
        split(0),
    ),
    "reduce_scatter_sequence": (mappings.reduce_scatter_to_sequence_parallel_region, reduce_scatter(0), gather(0)),
    "reduce_scatter_sequence_2": (
        functools.partial(mappings.reduce_scatter_to_sequence_parallel_region, sequence_dimension=2, dtype=torch.float64),
        reduce_scatter(2),
        gather(2),
    ),
}


@pytest.mark.core(keep=5)
@pytest.mark.parametrize("name", REGIONS)
def test_region(nxd: Nxd, name: str) -> None:
    nxd(WORLD, tp=TP)
    region, forward, backward = REGIONS[name]
    values = [torch.randn(SHAPE) for _ in range(WORLD)]
    x = own(values).requires_grad_()
    y = region(x)
    expected = [forward(values, r) for r in range(WORLD)]
    grads = [torch.randn_like(e) for e in expected]
    y.backward(own(grads))
    for r, (out, grad, before) in enumerate(zip(per_rank(y), per_rank(x.grad), per_rank(x), strict=True)):
        torch.testing.assert_close(out, expected[r])
        torch.testing.assert_close(grad, backward(grads, r))
        assert torch.equal(before, values[r])


@pytest.mark.parametrize("name", REGIONS)
def test_region_of_one_rank_is_the_identity(nxd: Nxd, name: str) -> None:
    nxd(2, tp=1)
    x = torch.randn(SHAPE)
    assert REGIONS[name][0](x) is x


@pytest.mark.parametrize("region", ["reduce_from_tensor_model_parallel_region", "reduce_from_context_model_parallel_region"])
def test_gradients_reduced_in_place(nxd: Nxd, region: str) -> None:
    """What training scripts do with sequence-parallel gradients: the result is dropped, the gradient itself must be the sum."""
    nxd(8, tp=2, cp=2)
    values = [torch.randn(3) for _ in range(8)]
    weight = torch.nn.Parameter(torch.zeros(3, device="xla"))
    weight.grad = own(values)
    reduce = getattr(mappings, region)
    assert reduce(weight.grad.data) is not None
    tensor = region.startswith("reduce_from_tensor")
    lists = (
        parallel_state.get_tensor_model_parallel_group(as_list=True)
        if tensor
        else parallel_state.get_context_model_parallel_group(as_list=True)
    )
    sums = {r: sum(values[k] for k in g) for g in lists for r in g}
    for r, found in enumerate(per_rank(weight.grad)):
        torch.testing.assert_close(found, sums[r])
    with torch.no_grad():
        reduce(weight.grad)
    for r, found in enumerate(per_rank(weight.grad)):
        torch.testing.assert_close(found, 2 * sums[r])


def test_explicit_group_and_context_group(nxd: Nxd) -> None:
    nxd(8, tp=2, cp=2)
    values = [torch.randn(2, 4) for _ in range(8)]
    x = own(values).requires_grad_()
    y = mappings.reduce_from_context_model_parallel_region(x)
    z = mappings.gather_from_tensor_model_parallel_region(y, process_group=parallel_state.get_data_parallel_group())
    z.sum().backward()
    lists = parallel_state.get_context_model_parallel_group(as_list=True)
    sums = {r: sum(values[k] for k in g) for g in lists for r in g}
    for g in parallel_state.get_data_parallel_group(as_list=True):
        for r in g:
            torch.testing.assert_close(per_rank(z)[r], torch.cat([sums[k] for k in g], -1))
    close(x.grad, torch.ones(2, 4))


@pytest.mark.parametrize("scatter_gather", [False, True])
def test_expert_regions(nxd: Nxd, scatter_gather: bool) -> None:
    """[E, C, H] to the tokens of all ranks for this rank's experts, and back; gradients take the same ways."""
    nxd(8, tp=2, ep=2)
    groups = parallel_state.get_expert_model_parallel_group(as_list=True)
    place = {r: k for g in groups for k, r in enumerate(g)}
    peers = {r: g for g in groups for r in g}
    values = [torch.randn(4, 3, 6, generator=torch.Generator().manual_seed(r // 2)) for r in range(8)]  # tp ranks hold the same
    x = own(values).requires_grad_()
    inside = mappings.enter_expert_parallel_region(x, scatter_gather)
    back = mappings.exit_expert_parallel_region(inside * 2, scatter_gather)
    weights = [torch.randn(4, 3, 6, generator=torch.Generator().manual_seed(50 + r // 2)) for r in range(8)]
    back.backward(own(weights))
    for r in range(8):
        mine = slice(place[r] * 2, place[r] * 2 + 2)
        torch.testing.assert_close(per_rank(inside)[r], torch.stack([values[p][mine] for p in peers[r]], 1))
        torch.testing.assert_close(per_rank(back)[r], 2 * values[r])
        torch.testing.assert_close(per_rank(x.grad)[r], 2 * weights[r])


def test_expert_regions_without_expert_parallelism(nxd: Nxd) -> None:
    nxd(2, tp=2)
    x = torch.randn(2, 3, 4)
    assert mappings.enter_expert_parallel_region(x, True) is x
    assert mappings.exit_expert_parallel_region(x, True) is x


@pytest.mark.parametrize("as_tensor", [False, True])
def test_spmd_scatters(nxd: Nxd, as_tensor: bool) -> None:
    nxd(8, tp=4)
    rank = parallel_state.get_tensor_model_parallel_rank()
    number = torch.zeros(1, dtype=torch.int32, device="xla") + rank if as_tensor else rank
    x = torch.randn(3, 8)
    run = per_rank(mappings.scatter_to_process_group_spmd(x.to("xla"), 1, number))
    strided = per_rank(mappings.round_robin_scatter_to_process_group_spmd(x.to("xla"), 1, number))
    for r in range(8):
        assert torch.equal(run[r], x.chunk(4, 1)[r % 4])
        assert torch.equal(strided[r], x[:, r % 4 :: 4])


def test_moves_by_name(nxd: Nxd) -> None:
    nxd(4, tp=4)
    values = [torch.randn(4, 8) for _ in range(4)]
    x = own(values)
    close(mappings._gather_along_first_dim(x), torch.cat(values))
    close(mappings._gather_along_last_dim(x), torch.cat(values, -1))
    close(mappings._reduce_scatter_along_dim(x, 0, "max", dtype=torch.float64) * 0, torch.zeros(1, 8))
    for r in range(4):
        assert torch.equal(per_rank(mappings._split_along_first_dim(x))[r], values[r].chunk(4)[r])
        assert torch.equal(per_rank(mappings._split_along_last_dim(x))[r], values[r].chunk(4, -1)[r])
        torch.testing.assert_close(per_rank(mappings._reduce_scatter_along_first_dim(x))[r], sum(values).chunk(4)[r])
        torch.testing.assert_close(per_rank(mappings._reduce_scatter_along_last_dim(x))[r], sum(values).chunk(4, -1)[r])
        most = torch.stack(values).amax(0)
        torch.testing.assert_close(per_rank(mappings._reduce_scatter_along_dim(x, 0, "max"))[r], most.chunk(4)[r])
        torch.testing.assert_close(per_rank(mappings._reduce_scatter_along_first_dim(x, computation="max"))[r], most.chunk(4)[r])
        torch.testing.assert_close(per_rank(mappings._reduce_scatter_along_last_dim(x, "max"))[r], most.chunk(4, -1)[r])
        torch.testing.assert_close(per_rank(mappings._reduce(x, "max"))[r], most)
        torch.testing.assert_close(per_rank(mappings.reduce_scatter_to_sequence_parallel_region_tiled(x))[r], sum(values).chunk(4)[r])


def test_what_does_not_divide_is_an_error(nxd: Nxd) -> None:
    nxd(4, tp=4)
    x = torch.zeros(6, 6, device="xla")
    with pytest.raises(AssertionError, match="6 is not divisible by 4"):
        mappings.scatter_to_tensor_model_parallel_region(x)
    with pytest.raises(AssertionError, match="6 is not divisible by 4"):
        mappings.reduce_scatter_to_sequence_parallel_region(x)


def test_cpu_tensors(nxd: Nxd) -> None:
    """Ranks cannot exchange them; taking one's own part is no exchange."""
    nxd(4, tp=4)
    with pytest.raises(ValueError, match=r"move it with .to\('xla'\)"):
        mappings.reduce_from_tensor_model_parallel_region(torch.zeros(4))
    part = mappings.scatter_to_tensor_model_parallel_region(torch.arange(8.0))
    assert part.device.type == "cpu" and [own.tolist() for own in per_rank(part.to("xla"))] == [[2.0 * r, 2.0 * r + 1] for r in range(4)]


def test_comm(nxd: Nxd) -> None:
    nxd(8, tp=4)
    groups = parallel_state.get_tensor_model_parallel_group(as_list=True)
    values = [torch.randn(4) for _ in range(8)]
    one, other = own(values), own(values)
    returned = comm.all_reduce("sum", one, groups)
    assert returned[0] is one
    assert comm.all_reduce("max", [other], parallel_state.get_tensor_model_parallel_group())[0] is other
    x = own(values)
    all_of = comm.all_gather(x, 0, groups)
    output = torch.zeros(1, device="xla")
    assert comm.reduce_scatter("sum", x, 0.5, 0, 4, groups, output=output, pin_layout=False) is output
    for r in range(8):
        torch.testing.assert_close(per_rank(one)[r], total(values, r))
        torch.testing.assert_close(per_rank(other)[r], torch.stack([values[k] for k in members(r)]).amax(0))
        torch.testing.assert_close(per_rank(all_of)[r], gathered(values, r, 0))
        torch.testing.assert_close(per_rank(output)[r], 0.5 * part(total(values, r), r, 0))
