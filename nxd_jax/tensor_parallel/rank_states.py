"""Nested Python data (state dicts) of a process that hosts several ranks: cut into each rank's own, and joined again. (NxD has no such functions.)

A script that runs once for several ranks has one state dict that stands for all of theirs: xla tensors and ranks in it differ. Checkpoint files hold
what one rank would have written by itself.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from nxd_jax.tensor_parallel import full_weights
from torch_bridge import nested
from torch_bridge.mesh import rank_numbers, world
from torch_bridge.recorder import sharded
from torch_bridge.recorder.rank_tensor import RankTensor

Likes = Mapping[tuple[Any, ...], torch.Tensor]
"""Where tensors of nested data will be copied to: by the keys that lead to them."""


# -- each rank's own ---------------------------------------------------------------------------------


def values(t: torch.Tensor, wanted: Sequence[int]) -> list[torch.Tensor]:
    """What some hosted ranks hold of a tensor, on the CPU; ranks that agree share one object."""
    t = t.detach()
    if not _of_ranks(t) or (t.device.type == "xla" and not sharded.varying(t).axes):
        return [t.cpu()] * len(wanted)
    hosted = world.current().hosted
    found = sharded.shards(t)
    return [found[hosted.index(r)] for r in wanted]


def split(data: object, wanted: Sequence[int], change: Callable[[torch.Tensor], torch.Tensor] | None = None) -> list[Any]:
    """`data` as some hosted ranks would have it, xla tensors on the CPU. change: applied to every rank's tensors, those on the CPU too."""

    def select(x: object) -> bool:
        return isinstance(x, torch.Tensor) and (change is not None or _of_ranks(x))

    def made(t: torch.Tensor) -> list[torch.Tensor]:
        own = values(t, wanted)
        once = {id(v): v if change is None else change(v) for v in own}
        return [once[id(v)] for v in own]

    columns = [made(t) for t in nested.collect(data, select)]
    return [nested.replace(numbers_of(data, r), select, [c[k] for c in columns]) for k, r in enumerate(wanted)]


def numbers_of(data: object, rank: int) -> Any:
    """`data` with numbers that differ by rank replaced by those of one hosted rank."""
    place = world.current().hosted.index(rank)
    found = nested.collect(data, _differs)
    return nested.replace(data, _differs, [rank_numbers.own(x, place) for x in found]) if found else data


def _of_ranks(t: torch.Tensor) -> bool:
    """Whether ranks may hold different values of a tensor."""
    return t.device.type == "xla" or isinstance(t, RankTensor)


def _differs(x: object) -> bool:
    return rank_numbers.values_of(x) is not None or rank_numbers.is_item(x)


# -- joined ------------------------------------------------------------------------------------------


def merge(states: Mapping[int, Any], likes: Likes | None = None, to_xla: Collection[int] = ()) -> Any:
    """One piece of data that stands for what every hosted rank has: `states[rank]`, the same object for ranks that read the same file.

    Tensors on which ranks agree stay on the CPU, others become xla tensors that differ by rank; so do numbers (as `RankInt`s). Dicts may have different
    keys (stages of a pipeline): the result has all, and ranks without a key hold what a neighbour has. likes: parameters that the tensors are for;
    theirs become xla tensors that lie among the ranks as the parameter does. to_xla: ids of tensors that go to xla also where ranks agree.

    Raises ValueError for tensors of different shape or dtype, RuntimeError if ranks disagree about a tensor for a parameter on the CPU.
    """
    return _Merge(likes or {}, to_xla).join((), dict(states))


class _Merge:
    def __init__(self, likes: Likes, to_xla: Collection[int]):
        self.likes = likes
        self.to_xla = to_xla
        self.done: dict[tuple[int, ...], Any] = {}
        """What tensors that are the same objects in every file became."""
        self.keep: list[Any] = []

    def join(self, path: tuple[Any, ...], found: dict[int, Any]) -> Any:
        first = next(iter(found.values()))
        kinds = {type(v) for v in found.values()}
        if all(isinstance(v, torch.Tensor) for v in found.values()):
            return self._tensor(path, found)
        if all(isinstance(v, dict) for v in found.values()):
            return self._dict(path, found, first)
        if isinstance(first, (list, tuple)) and len(kinds) == 1 and len({len(v) for v in found.values()}) == 1:
            items = [self.join((*path, k), {r: v[k] for r, v in found.items()}) for k in range(len(first))]
            return type(first)(*items) if hasattr(first, "_fields") else type(first)(items)
        if kinds <= {int, float, bool} and any(v != first for v in found.values()):
            return world.current().table(lambda r: found[_nearest(r, found)])
        return first

    def _dict(self, path: tuple[Any, ...], found: dict[int, Any], first: dict[Any, Any]) -> dict[Any, Any]:
        keys = dict.fromkeys(k for v in {id(v): v for v in found.values()}.values() for k in v)
        made = copy.copy(first)
        made.clear()
        for k in keys:
            made[k] = self.join((*path, k), {r: v[k] for r, v in found.items() if k in v})
        return made

    def _tensor(self, path: tuple[Any, ...], found: dict[int, torch.Tensor]) -> torch.Tensor:
        like = self.likes.get(path)
        different = {id(t): t for t in found.values()}
        _check_alike(path, list(different.values()))
        key = tuple(id(t) for t in found.values())
        if like is None and key in self.done:
            return self.done[key]
        made = self._placed(path, found, like, _classes(list(different.values())))
        if like is None:
            self.done[key] = made
            self.keep.append(found)
        return made

    def _placed(
        self, path: tuple[Any, ...], found: dict[int, torch.Tensor], like: torch.Tensor | None, classes: dict[int, int]
    ) -> torch.Tensor:
        here = world.current().hosted
        nearest = {r: found[_nearest(r, found)] for r in here}
        differ = len(set(classes.values())) > 1
        axes: set[str] = set()
        if differ and len(here) < world.size():
            axes = set(world.current().axes)
        elif differ:
            axes = set(world.axes_of_table([classes[id(nearest[r])] for r in range(world.size())]))
        cuts: dict[int, tuple[str, ...]] = {}
        if like is not None and like.device.type == "xla":
            cuts = full_weights.cuts_now(like)
        elif like is not None and differ:
            raise RuntimeError(
                f"{name_of(path)} differs among the ranks that this process hosts, but the model's is on {like.device}, where a tensor is the same for all: "
                "move the model to xla before loading"
            )
        more = tuple(axes.difference(*cuts.values()))
        first = next(iter(cuts), 0)
        cuts = {**cuts, first: (*cuts.get(first, ()), *more)} if more else cuts
        uploaded = like is None and id(nearest[here[0]]) in self.to_xla
        if not any(cuts.values()) and not uploaded:
            return nearest[here[0]]
        made = sharded.from_ranks(lambda r: nearest[r].contiguous(), cuts)
        return made if like is None else full_weights.beside(made, like)


def name_of(path: Sequence[Any]) -> str:
    """How errors name a place in nested data."""
    return ".".join(str(k) for k in path) or "the checkpoint"


def _nearest(rank: int, among: Mapping[int, Any]) -> int:
    """The rank itself, or the one that shares most of its places on the mesh."""
    if rank in among:
        return rank
    places = [world.coordinates(a) for a in world.current().axes]
    return min(among, key=lambda r: sum(p[r] != p[rank] for p in places))


def _check_alike(path: tuple[Any, ...], tensors: Sequence[torch.Tensor]) -> None:
    kinds = {(tuple(t.shape), t.dtype) for t in tensors}
    if len(kinds) > 1:
        shown = " and ".join(sorted(f"{dtype} of shape {list(shape)}" for shape, dtype in kinds))
        raise ValueError(f"{name_of(path)} is {shown} in the files of different ranks: ranks of one process need one shape")


def _classes(tensors: Sequence[torch.Tensor]) -> dict[int, int]:
    """A number for each tensor, by its id; equal for those with the same bits."""
    found: dict[int, int] = {}
    leaders: list[torch.Tensor] = []
    for t in tensors:
        same = (k for k, other in enumerate(leaders) if _same(t, other))
        found[id(t)] = next(same, len(leaders))
        if found[id(t)] == len(leaders):
            leaders.append(t)
    return found


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool(torch.equal(_bits(a), _bits(b)))


def _bits(t: torch.Tensor) -> torch.Tensor:
    t = torch.view_as_real(t) if t.is_complex() else t
    return t.contiguous().reshape(-1).view(torch.uint8) if t.numel() and t.is_floating_point() else t
