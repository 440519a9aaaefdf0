"""Along which mesh axes groups of ranks differ, for collectives that name their groups by ranks."""

from __future__ import annotations

import functools
import json
from typing import NamedTuple

from torch_bridge.mesh import world

Axes = frozenset[str]


class GroupAxes(NamedTuple):
    """apart: axes along which neighbours are in different groups. uneven: axes along which a rank's members, in their order, lie otherwise than its neighbour's
    (seen from each of them); among these are all axes along which a group has several ranks."""

    apart: Axes
    uneven: Axes


def of(groups: str) -> GroupAxes:
    """Of groups as recorded collectives name them: lists of ranks, as JSON. Ranks that are in none are groups of one."""
    now = world.current()
    return _of(groups, tuple(now.axes.items()), now.order)


@functools.lru_cache(maxsize=256)
def _of(groups: str, axes: tuple[tuple[str, int], ...], order: tuple[int, ...]) -> GroupAxes:
    at = list(zip(*(world.coordinates(axis) for axis, _ in axes), strict=True))
    there = set(order)
    members = {r: [r] for r in order}
    for group in json.loads(groups):
        members.update((r, group) for r in group if r in there)
    last = max(order)
    own = [tuple(members.get(r, ())) for r in range(last + 1)]
    seen = [
        tuple(tuple(b - a for a, b in zip(at[r], at[m], strict=True)) if m in there else None for m in members.get(r, ()))
        for r in range(last + 1)
    ]
    return GroupAxes(frozenset(world.axes_of_table(own)), frozenset(world.axes_of_table(seen)))
