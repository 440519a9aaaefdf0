"""How tensors enter and leave regions in which ranks work on parts of them.

Each region is a collective with the gradient that belongs to it:

    region                    forward          backward
    copy_to                   identity         all-reduce
    reduce_from               all-reduce       identity
    scatter_to                own part         all-gather
    gather_from               all-gather       own part
    reduce_scatter_to         reduce-scatter   all-gather
    gather_from (sequence)    all-gather       reduce-scatter (or own part)

In a group of one, all are the identity. Tensors must be on xla in larger groups. `process_group` defaults to the tensor parallel group.

The `reduce_from_*` regions write the sum into their input, as NxD's do, where no gradient is recorded: scripts reduce gradients in this way and drop the
result. While one is recorded they give a new tensor, since a formula of the backward pass may still need the input.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from nxd_jax.tensor_parallel import layer_groups, parallel_groups
from nxd_jax.tensor_parallel.partition import ensure_divisibility
from torch_bridge.collectives import functional

if TYPE_CHECKING:
    from torch_bridge.mesh.groups import GroupLike

Move = Callable[[torch.Tensor], torch.Tensor]


class _Region(torch.autograd.Function):
    """One move forward and another one for the gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, there: Move, back: Move) -> torch.Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return ctx.back(grad), None, None


def region(x: torch.Tensor, group: GroupLike, there: Callable[..., torch.Tensor], back: Callable[..., torch.Tensor]) -> torch.Tensor:
    """`there(x, process_group=group)`, with `back` for the gradient; x itself in a group of one."""
    if layer_groups.size(group) == 1:
        return x
    return _Region.apply(x, functools.partial(there, process_group=group), functools.partial(back, process_group=group))


# -- moves without a gradient (NxD's model code calls these by name) ---------------------------------


def same(x: torch.Tensor, process_group: GroupLike = None) -> torch.Tensor:
    """A view of x: what autograd takes for another tensor."""
    return x.view_as(x)


def reduce(x: torch.Tensor, computation: str = "sum", process_group: GroupLike = None) -> torch.Tensor:
    """All-reduce to a new tensor."""
    group = layer_groups.tensor_parallel(process_group)
    return x if layer_groups.size(group) == 1 else functional.all_reduce(computation, x, groups=group)


def split_along_dim(x: torch.Tensor, partition_dim: int, process_group: GroupLike = None) -> torch.Tensor:
    """This rank's part along a dim, as a tensor of its own. Raises AssertionError if the dim does not divide by the group's size."""
    group = layer_groups.tensor_parallel(process_group)
    count = layer_groups.size(group)
    if count == 1:
        return x
    ensure_divisibility(x.shape[partition_dim], count)
    part = x.shape[partition_dim] // count
    return x.narrow(partition_dim, layer_groups.rank(group) * part, part).contiguous()


def gather_along_dim(x: torch.Tensor, partition_dim: int, process_group: GroupLike = None, tile_cc: bool = False) -> torch.Tensor:
    """The group's tensors side by side along a dim. tile_cc, a hint to the Neuron compiler, has no effect."""
    group = layer_groups.tensor_parallel(process_group)
    return x if layer_groups.size(group) == 1 else functional.all_gather(x, partition_dim, group)


def reduce_scatter_along_dim(
    x: torch.Tensor,
    partition_dim: int,
    computation: str = "sum",
    process_group: GroupLike = None,
    tile_cc: bool = False,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Reduce over the group and keep this rank's part along a dim. dtype: to reduce in (the result has x's). tile_cc: accepted."""
    group = layer_groups.tensor_parallel(process_group)
    count = layer_groups.size(group)
    if count == 1:
        return x
    ensure_divisibility(x.shape[partition_dim], count)
    wide = x if dtype is None else x.to(dtype)
    return functional.reduce_scatter(computation, wide, 1.0, partition_dim, count, group).to(x.dtype)


def split_along_first_dim(x: torch.Tensor, process_group: GroupLike = None) -> torch.Tensor:
    return split_along_dim(x, 0, process_group)


def split_along_last_dim(x: torch.Tensor, process_group: GroupLike = None) -> torch.Tensor:
    return split_along_dim(x, -1, process_group)


def gather_along_first_dim(x: torch.Tensor, process_group: GroupLike = None) -> torch.Tensor:
    return gather_along_dim(x, 0, process_group)


def gather_along_last_dim(x: torch.Tensor, process_group: GroupLike = None) -> torch.Tensor:
    return gather_along_dim(x, -1, process_group)


def reduce_scatter_along_first_dim(x: torch.Tensor, computation: str = "sum", process_group: GroupLike = None) -> torch.Tensor:
    return reduce_scatter_along_dim(x, 0, computation, process_group)


def reduce_scatter_along_last_dim(x: torch.Tensor, computation: str = "sum", process_group: GroupLike = None) -> torch.Tensor:
    return reduce_scatter_along_dim(x, -1, computation, process_group)


# -- tensor parallel regions -------------------------------------------------------------------------


def copy_to_tensor_model_parallel_region(x: torch.Tensor, process_group: GroupLike = None) -> torch.Tensor:
    """x itself; its gradient is summed over the ranks, which each use x for their part of the work."""
    return region(x, layer_groups.tensor_parallel(process_group), same, reduce)


def reduce_from_tensor_model_parallel_region(x: torch.Tensor, process_group: GroupLike = None) -> torch.Tensor:
    """The sum of the ranks' partial results, written into `x` unless its gradient is recorded."""
    return reduce_from(x, layer_groups.tensor_parallel(process_group))


def scatter_to_tensor_model_parallel_region(x: torch.Tensor, process_group: GroupLike = None) -> torch.Tensor:
    """This rank's part of the last dim."""
    return scatter(x, -1, layer_groups.tensor_parallel(process_group))


def gather_from_tensor_model_parallel_region(x: torch.Tensor, process_group: GroupLike = None) -> torch.Tensor:
    """The ranks' parts side by side along the last dim."""
    return gather(x, -1, layer_groups.tensor_parallel(process_group))


def gather_from_tensor_model_parallel_region_with_dim(x: torch.Tensor, gather_dim: int, process_group: GroupLike = None) -> torch.Tensor:
    """The ranks' parts side by side along `gather_dim`."""
    return gather(x, gather_dim, layer_groups.tensor_parallel(process_group))


def reduce_scatter_to_tensor_model_parallel_region_with_dim(
    x: torch.Tensor, partition_dim: int, process_group: GroupLike = None
) -> torch.Tensor:
    """This rank's part along `partition_dim` of the sum of the ranks' partial results."""
    return reduce_scatter_to_sequence_parallel_region(x, partition_dim, process_group)


def scatter_input_channels_to_tensor_model_parallel_region(x: torch.Tensor, process_group: GroupLike = None) -> torch.Tensor:
    """This rank's part of the channels of images: dim 1 of [N, C, H, W] (dim 0 of [C, H, W])."""
    return scatter(x, -3, layer_groups.tensor_parallel(process_group))


def reduce_from(x: torch.Tensor, group: GroupLike) -> torch.Tensor:
    if x.requires_grad and torch.is_grad_enabled():
        return region(x, group, reduce, same)
    if layer_groups.size(group) == 1:
        return x
    with torch.no_grad():
        return x.copy_(reduce(x, process_group=group))


def scatter(x: torch.Tensor, dim: int, group: GroupLike) -> torch.Tensor:
    """This rank's part along a dim; the gradient is gathered."""
    return region(x, group, functools.partial(split_along_dim, partition_dim=dim), functools.partial(gather_along_dim, partition_dim=dim))


def gather(x: torch.Tensor, dim: int, group: GroupLike) -> torch.Tensor:
    """The ranks' parts side by side along a dim; the gradient's own part goes back."""
    return region(x, group, functools.partial(gather_along_dim, partition_dim=dim), functools.partial(split_along_dim, partition_dim=dim))


# -- context and sequence parallel regions -------------------------------------------------------------


def reduce_from_context_model_parallel_region(x: torch.Tensor, process_group: GroupLike = None) -> torch.Tensor:
    """The sum over the context parallel group, written into `x` unless its gradient is recorded; the gradient passes unchanged."""
    return reduce_from(x, parallel_groups.group("cp") if process_group is None else process_group)


def scatter_to_sequence_parallel_region(
    x: torch.Tensor, sequence_dimension: int | None = 0, process_group: GroupLike = None
) -> torch.Tensor:
    """This rank's part of the sequence."""
    return scatter(x, sequence_dimension or 0, layer_groups.tensor_parallel(process_group))


def gather_from_sequence_parallel_region(
    x: torch.Tensor,
    sequence_dimension: int | None = 0,
    to_model_parallel: bool = True,
    process_group: GroupLike = None,
    tile_cc: bool = False,
) -> torch.Tensor:
    """The whole sequence from the ranks' parts.

    to_model_parallel: the ranks go on with different work, so each has only its share of the gradient, and the shares are summed
    (reduce-scatter). False: they all do the same, and each keeps its part of the gradient that they share. tile_cc has no effect.
    """
    dim = sequence_dimension or 0
    group = layer_groups.tensor_parallel(process_group)
    if not to_model_parallel:
        return gather(x, dim, group)
    there = functools.partial(gather_along_dim, partition_dim=dim)
    return region(x, group, there, functools.partial(reduce_scatter_along_dim, partition_dim=dim))


def reduce_scatter_to_sequence_parallel_region(
    x: torch.Tensor, sequence_dimension: int | None = 0, process_group: GroupLike = None, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """This rank's part of the sequence of the sum of the ranks' partial results. dtype: to reduce in (the result has x's)."""
    dim = sequence_dimension or 0
    there = functools.partial(reduce_scatter_along_dim, partition_dim=dim, dtype=dtype)
    return region(x, layer_groups.tensor_parallel(process_group), there, functools.partial(gather_along_dim, partition_dim=dim))


def reduce_scatter_to_sequence_parallel_region_tiled(
    x: torch.Tensor, sequence_dimension: int | None = 0, process_group: GroupLike = None
) -> torch.Tensor:
    """`reduce_scatter_to_sequence_parallel_region`; NxD's cuts the collective into tiles, which XLA does as it sees fit."""
    return reduce_scatter_to_sequence_parallel_region(x, sequence_dimension, process_group)


# -- expert parallel regions ---------------------------------------------------------------------------


def enter_expert_parallel_region(x: torch.Tensor, scatter_gather: bool = False, process_group: GroupLike = None) -> torch.Tensor:
    """From this rank's tokens for all experts, [E, C, H], to all ranks' tokens for its experts, [E / ep, ep, C, H].

    scatter_gather: tensor parallel ranks, which hold the same tokens, send a part of H each and gather the rest among themselves. Without
    expert parallelism (ep 1), x itself. process_group: default the expert parallel group.
    """
    group = parallel_groups.group("ep") if process_group is None else process_group
    if layer_groups.size(group) == 1:
        return x
    return _between_scattered(x, scatter_gather, lambda part: region(part, group, _to_experts, _from_experts))


def exit_expert_parallel_region(x: torch.Tensor, scatter_gather: bool = False, process_group: GroupLike = None) -> torch.Tensor:
    """The way back from `enter_expert_parallel_region`: [E / ep, ep, C, H] to [E, C, H]."""
    group = parallel_groups.group("ep") if process_group is None else process_group
    if layer_groups.size(group) == 1:
        return x
    return _between_scattered(x, scatter_gather, lambda part: region(part, group, _from_experts, _to_experts))


def _between_scattered(x: torch.Tensor, scattered: bool, move: Move) -> torch.Tensor:
    if not scattered:
        return move(x)
    return gather_from_tensor_model_parallel_region(move(scatter_to_tensor_model_parallel_region(x)))


def _to_experts(x: torch.Tensor, process_group: GroupLike) -> torch.Tensor:
    count = layer_groups.size(process_group)
    ensure_divisibility(x.shape[0], count)
    moved = functional.all_to_all(x, 0, 0, count, process_group)
    return moved.reshape(count, x.shape[0] // count, *x.shape[1:]).transpose(0, 1).contiguous()


def _from_experts(x: torch.Tensor, process_group: GroupLike) -> torch.Tensor:
    count = layer_groups.size(process_group)
    flat = x.transpose(0, 1).reshape(x.shape[0] * count, *x.shape[2:])
    return functional.all_to_all(flat, 0, 0, count, process_group)


# -- parts chosen by a rank that is itself a tensor ----------------------------------------------------


def scatter_to_process_group_spmd(x: torch.Tensor, partition_dim: int, rank: Any, process_group: GroupLike = None) -> torch.Tensor:
    """Part `rank` of x along a dim, of as many parts as the group has ranks. rank: a number or an int tensor (`SPMDRank`)."""
    group = layer_groups.tensor_parallel(process_group)
    part = _part_size(x, partition_dim, group)
    index = torch.arange(part, device=x.device) + _number(rank) * part
    return x.index_select(partition_dim, index)


def round_robin_scatter_to_process_group_spmd(
    x: torch.Tensor, partition_dim: int, rank: Any, process_group: GroupLike = None
) -> torch.Tensor:
    """Entries `rank`, `rank + n`, `rank + 2n`, ... of x along a dim, for a group of n ranks."""
    group = layer_groups.tensor_parallel(process_group)
    part = _part_size(x, partition_dim, group)
    index = torch.arange(part, device=x.device) * layer_groups.size(group) + _number(rank)
    return x.index_select(partition_dim, index)


def _part_size(x: torch.Tensor, dim: int, group: GroupLike) -> int:
    ensure_divisibility(x.shape[dim], layer_groups.size(group))
    return x.shape[dim] // layer_groups.size(group)


def _number(rank: object) -> Any:
    return rank.reshape(()) if isinstance(rank, torch.Tensor) else rank
