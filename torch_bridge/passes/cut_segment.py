"""A segment as a list of parts, each of which is compiled to a program of its own.

By default a segment is one part. Where tensors lie at places (`place_nodes`), or a session has a `placement` (`runtime.session.Session`), nodes at one place
become one part, or several where what lies between them is computed at another place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch_bridge.mesh.places import HERE, Place


@dataclass(frozen=True, eq=False)
class Part:
    """What one program of a segment computes. Parts are told apart by identity.

    Attributes:
        results: ids of the values that it gives.
        given: ids of the values that it may take from parts before it.
        shared: leaves (by position) that a later part reads, so that it may not take them over.
        place: where it runs.
        late: it may run later than the parts before it, when somebody needs its results.
    """

    results: tuple[int, ...]
    given: frozenset[int] = frozenset()
    shared: frozenset[int] = frozenset()
    place: Place = HERE
    late: bool = False

    @property
    def is_whole(self) -> bool:
        """Whether it is all there is of its segment, as far as it can say."""
        return not (self.given or self.shared or self.late) and self.place is HERE


def cut(
    nodes: Sequence[tuple[Any, ...]], outs: Sequence[int], places: Sequence[Place], first: Sequence[int] | None = None
) -> tuple[Part, ...]:
    """The parts of a segment in the order in which they run.

    places: where each node runs. first: the results that are needed at once: what only others depend on is in late parts, after all others.

    A part has the nodes of one place and one level. A node's level is that of its inputs, one more if an input is computed at another place. So a part
    needs parts before it only. What only a later part reads is computed there (`_sunk`).
    """
    if len(places) != len(nodes):
        raise ValueError(f"a placement must give a place for each of the {len(nodes)} recorded nodes, got {len(places)}")
    producer = [i for i, node in enumerate(nodes) for _ in range(node[0].n_outs)]
    needed = _needed(nodes, outs, producer)
    level: dict[int, int] = {}
    for i in needed:
        inputs = {producer[v] for v in nodes[i][1:] if v >= 0}
        level[i] = max((level[j] + (places[j] != places[i]) for j in inputs), default=0)
    level = _sunk(nodes, needed, producer, places, level)
    early = set(needed if first is None else _needed(nodes, first, producer))
    members: dict[tuple[bool, int, Place], list[int]] = {}
    for i in needed:
        members.setdefault((i not in early, level[i], places[i]), []).append(i)
    order = sorted(members, key=lambda key: key[:2])
    number = {i: k for k, key in enumerate(order) for i in members[key]}
    results: list[set[int]] = [set() for _ in order]
    for v in outs:
        results[number[producer[v]]].add(v)
    last: dict[int, int] = {}
    for i in needed:
        for v in nodes[i][1:]:
            if v < 0:
                last[-v - 1] = max(last.get(-v - 1, 0), number[i])
            elif number[producer[v]] != number[i]:
                results[number[producer[v]]].add(v)
    parts, before = [], frozenset[int]()
    for k, key in enumerate(order):
        shared = frozenset(leaf for leaf, end in last.items() if end > k)
        parts.append(Part(tuple(sorted(results[k])), before, shared, key[2], key[0]))
        before |= results[k]
    return tuple(parts)


def _sunk(
    nodes: Sequence[tuple[Any, ...]], needed: Sequence[int], producer: Sequence[int], places: Sequence[Place], level: dict[int, int]
) -> dict[int, int]:
    """Levels with nodes that only later parts read in the first of these: a transposed weight, say, which would be a copy if it went from part to part.

    A node stays if one of its inputs does, which would have to go from part to part in its stead.
    """
    readers: dict[int, list[int]] = {}
    for i in needed:
        for j in {producer[v] for v in nodes[i][1:] if v >= 0}:
            readers.setdefault(j, []).append(i)
    if len(set(level.values())) < 2:
        return level
    stays: set[int] = set()
    while True:
        found = dict(level)
        for j in reversed(needed):
            if j in readers and j not in stays:
                found[j] = max(level[j], min(found[i] - (places[i] != places[j]) for i in readers[j]))
        held = {i for j, after in readers.items() for i in after if level[i] < found[i] > found[j] and places[i] == places[j]}
        if not held:
            return found
        stays |= held


def _needed(nodes: Sequence[tuple[Any, ...]], outs: Sequence[int], producer: Sequence[int]) -> list[int]:
    """The nodes that these values depend on, in order."""
    wanted, stack = set[int](), [producer[v] for v in outs]
    while stack:
        i = stack.pop()
        if i not in wanted:
            wanted.add(i)
            stack.extend(producer[v] for v in nodes[i][1:] if v >= 0)
    return sorted(wanted)
