"""Groups of ranks that take part in collectives, and how they lie on the mesh.

A script gives groups as lists of lists of ranks. When they are the lines of the mesh along some axes (tensor-parallel groups, say), a collective
runs over those axes; any other division of the world into equal groups works too, more slowly.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from torch_bridge.mesh import world

if TYPE_CHECKING:
    import torch.distributed as dist

Members = tuple[tuple[int, ...], ...]


class HasMesh(Protocol):
    """A process group of ours, or what stands for one: `_mesh` lists the ranks of all groups."""

    @property
    def _mesh(self) -> Sequence[Sequence[int]]: ...


GroupLike: TypeAlias = "Sequence[Sequence[int]] | dist.ProcessGroup | HasMesh | None"
"""What scripts give for groups; None: all ranks are one."""


class Groups:
    """A division of the world into groups of one size.

    members: ranks of each group, in group order. axes: the mesh axes that the groups are the lines of, outermost first; None if there
    are none such. ordered: along those axes, ranks come in group order. text: how recorded collectives name it, "tp" or "[[0, 3], [1, 2]]".
    """

    def __init__(self, members: Members):
        self.members = members
        self.size = len(members[0])
        self.axes, self.ordered = _find_axes(members)
        explicit = self.axes is None or not self.ordered
        self.text = str([list(m) for m in members]) if explicit else ",".join(self.axes or ())
        """Names axes only if order on them is group order."""
        self.loose_text = self.text if self.axes is None else ",".join(self.axes)
        """Names axes also if only the sets agree: enough for reductions."""

    @functools.cached_property
    def _places(self) -> dict[int, tuple[tuple[int, ...], int]]:
        return {rank: (group, k) for group in self.members for k, rank in enumerate(group)}

    def of(self, rank: int) -> tuple[int, ...]:
        """The group that a rank is in."""
        return self._places[rank][0]

    def index(self, rank: int) -> int:
        """A rank's place in its group."""
        return self._places[rank][1]

    def processes(self) -> tuple[int, ...] | None:
        """The processes that a message between members concerns: this one, those that host others of the groups of its ranks, and so on; None: all."""
        if world.process_count() == 1 or world.current().process[1] > 1:
            return None
        parts = [{world.process_of(rank) for rank in group} for group in self.members]
        found = {world.process_index()}
        while True:
            more = found.union(*(part for part in parts if part & found))
            if more == found:
                return None if len(found) == world.process_count() else tuple(sorted(found))
            found = more


def lines(axes: Sequence[str]) -> Members:
    """The groups of ranks that differ along these axes alone, each in mesh order."""
    names = list(world.current().axes)
    others = [world.coordinates(a) for a in names if a not in axes]
    found: dict[tuple[int, ...], list[int]] = {}
    for rank in world.current().order:
        found.setdefault(tuple(c[rank] for c in others), []).append(rank)
    return tuple(tuple(g) for g in found.values())


def _find_axes(members: Members) -> tuple[tuple[str, ...] | None, bool]:
    names = [a for a, n in world.current().axes.items() if n > 1]
    wanted = frozenset(frozenset(m) for m in members)
    for k in range(len(names) + 1):
        for axes in itertools.combinations(names, k):
            have = lines(axes)
            if frozenset(frozenset(m) for m in have) == wanted:
                return axes, set(have) == set(members)
    return None, False


_cache: dict[Any, Groups] = {}


def everyone() -> Groups:
    """The whole world as one group."""
    return _of((tuple(range(world.size())),))


def along(axes: Sequence[str]) -> Groups:
    """The lines of the mesh along some axes."""
    return _of(lines(axes))


def sisters(ranks: Sequence[int]) -> list[list[int]]:
    """The lists of all groups, from the ranks of the one that a script made for itself: the lines of the mesh that hold it, or equal runs or strides.

    Raises ValueError if the ranks are no part of such a division.
    """
    count, size = world.size(), len(ranks)
    if size == count:
        return [list(ranks)]
    names = [a for a, n in world.current().axes.items() if n > 1]
    for k in range(1, len(names) + 1):
        for axes in itertools.combinations(names, k):
            have = lines(axes)
            if tuple(ranks) in have:
                return [list(g) for g in have]
    step = ranks[1] - ranks[0] if size > 1 else 1
    if step > 0 and list(ranks) == list(range(ranks[0], ranks[0] + step * size, step)) and count % (step * size) == 0:
        found = [[b + o + step * k for k in range(size)] for b in range(0, count, step * size) for o in range(step)]
        if list(ranks) in found:
            return found
    raise ValueError(
        f"new_group({list(ranks)}): in a process that hosts several ranks, every rank needs a group, and these ranks are no line of the mesh "
        f'{world.current().axes}: say what the other groups are with pg_options={{"xla_pg_options": {{"mesh": [[...], [...]]}}}}'
    )


def resolve(groups: GroupLike = None) -> Groups:
    """Groups from what a script passes: None or empty (all ranks), lists of lists of ranks, or a process group (which NxD's own model code passes).

    Raises TypeError for anything else, and ValueError for ranks that do not exist, appear twice or are left out, or groups of different sizes.
    """
    if groups is None:
        return everyone()
    if hasattr(groups, "_mesh"):
        return _of_mesh(groups._mesh)
    if not isinstance(groups, Sequence) or isinstance(groups, str):
        raise TypeError(f"groups must be a list of lists of ranks such as [[0]], got {groups!r}")
    if not groups:
        return everyone()
    return _of(_checked(groups))


_LARGE = 64
"""Ranks from which on the groups of a process group are kept: looking at every rank of a large world takes longer than what asks for them."""
_resolved: dict[int, tuple[Sequence[Sequence[int]], Sequence[Sequence[int]], int, Groups]] = {}
"""By the id of a process group's `_mesh`: the list itself, its contents then, the layout's epoch, and the groups."""


def _of_mesh(mesh: Sequence[Sequence[int]]) -> Groups:
    """`resolve` the ranks of a process group, which are looked at again only if they have changed."""
    now = world.current()
    if now.size < _LARGE:
        return resolve(mesh)
    known = _resolved.get(id(mesh))
    if known is not None and known[0] is mesh and known[1] == mesh and known[2] == now.epoch:
        return known[3]
    found = resolve(mesh)
    if len(_resolved) >= 64:
        _resolved.clear()
    _resolved[id(mesh)] = mesh, [list(group) for group in mesh], now.epoch, found
    return found


def _of(members: Members) -> Groups:
    key = (members, tuple(world.current().axes.items()), world.current().order)
    found = _cache.get(key)
    if found is None:
        found = _cache[key] = Groups(members)
    return found


def _checked(groups: Sequence[Any]) -> Members:
    count = world.size()
    seen: set[int] = set()
    for group in groups:
        if not isinstance(group, Sequence) or isinstance(group, str) or not all(type(m) is int for m in group):
            raise TypeError(f"groups must be a list of lists of ranks such as [[0]], got {groups!r} (one of its groups is {group!r})")
        if not group:
            raise ValueError(f"groups={groups} has an empty group")
        for member in group:
            if not 0 <= member < count:
                raise ValueError(f"groups={groups}: rank {member} does not exist in a world of {count} (ranks {list(range(count))})")
            if member in seen:
                raise ValueError(f"groups={groups}: rank {member} appears more than once")
            seen.add(member)
    missing = [r for r in world.current().hosted if r not in seen]
    if missing:
        raise ValueError(f"groups={groups} leaves out this worker, rank {missing[0]}: every rank must be in one group")
    if len({len(g) for g in groups}) > 1:
        raise ValueError(
            f"groups={groups} have different sizes {sorted({len(g) for g in groups})}: XLA collectives need groups of one size"
        )
    if len(seen) != count:
        raise ValueError(
            f"groups={groups} leave out ranks {sorted(set(range(count)) - seen)} of a world of {count}: every rank must be in one group"
        )
    return tuple(tuple(g) for g in groups)
