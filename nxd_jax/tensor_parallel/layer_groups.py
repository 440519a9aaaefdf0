"""The group of ranks that a layer or a region works in, its size, and each rank's place in it."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from nxd_jax.tensor_parallel import parallel_groups
from torch_bridge.mesh import groups, world
from torch_bridge.mesh.groups import GroupLike, Groups


class Members:
    """Groups by their ranks alone, with what collectives need of a process group: `_mesh`."""

    def __init__(self, mesh: Sequence[Sequence[int]]):
        self._mesh = [list(group) for group in mesh]


def tensor_parallel(group: GroupLike = None) -> Any:
    """The group given, or this rank's tensor parallel group."""
    return parallel_groups.group("tp") if group is None else group


def of_layer(group: GroupLike = None) -> Any:
    """The group that a layer is built for. Without model parallel groups, sets up groups of one with a warning (as NxD does)."""
    if group is None and not parallel_groups.initialized():
        warnings.warn(
            "a parallel layer was made before parallel_state.initialize_model_parallel(...): it is not divided among ranks. Call "
            "torch.distributed.init_process_group('xla') and initialize_model_parallel(tensor_model_parallel_size=...) first.",
            UserWarning,
            stacklevel=4,
        )
        started = not dist.is_initialized()
        if started:
            from torch_bridge.collectives import backend

            backend.init_process_group("xla")
        parallel_groups.lay_out(parallel_groups.plan())
        parallel_groups.current().unasked = "process group" if started else "groups"
    return tensor_parallel(group)


def size(group: GroupLike) -> int:
    """Ranks in a group."""
    return groups.resolve(group).size


def rank(group: GroupLike) -> Any:
    """This rank's place in its group: an int, or a `RankInt` with each rank's own if the process hosts several."""
    return world.current().table(_places(groups.resolve(group)).__getitem__)


def place_of(group: GroupLike, world_rank: int) -> int:
    """The place in its group of a rank of the world."""
    return _places(groups.resolve(group))[world_rank]


@functools.cache
def _places(among: Groups) -> dict[int, int]:
    return {r: k for members in among.members for k, r in enumerate(members)}


def ordered(group: GroupLike, rank_ordering: Sequence[int] | None) -> Any:
    """The group with its members in the order of the shards they hold: member k of the group given holds shard `rank_ordering[k]`.

    Raises ValueError if `rank_ordering` is not a rearrangement of 0..size-1.
    """
    if rank_ordering is None:
        return group
    order = [int(k) for k in rank_ordering]
    members = groups.resolve(group).members
    if sorted(order) != list(range(len(members[0]))):
        raise ValueError(
            f"rank_ordering={order} must name each of the shards 0..{len(members[0]) - 1} once, one for every rank of the group"
        )
    return Members([[m[order.index(k)] for k in range(len(m))] for m in members])


def hosts_several(group: GroupLike) -> bool:
    """Whether this process computes for several ranks and the group divides something among them: a CPU tensor cannot hold all parts."""
    return len(world.current().hosted) > 1 and size(group) > 1
