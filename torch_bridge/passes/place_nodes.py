"""Where each node of a segment runs: where its inputs lie.

A value lies at a place (`mesh.places`) or on the mesh of the world, which has all places. A node runs at the place of its inputs; those on the mesh of the
world are there, too. If its inputs lie at several places, it runs on the mesh of the world, and they are moved there. A node without inputs at a place runs
where its results are needed: at one place, or else on the mesh of the world (or at the segment's `home`). A collective with ranks elsewhere runs on the mesh of
the world.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from torch_bridge import lowerings
from torch_bridge.mesh import places
from torch_bridge.mesh.places import HERE, Place

Nodes = Sequence[tuple[Any, ...]]


class Inputs:
    """The places that nodes have from their inputs, as far as a segment is recorded: None for those whose inputs lie at none, HERE for several.

    of_value: by value id.
    """

    def __init__(self, leaves: Sequence[Place | None] = ()):
        self.leaves = leaves
        self.of_node: list[Place | None] = []
        self.of_value: list[Place | None] = []

    def follow(self, nodes: Nodes) -> None:
        """Go on to the last node."""
        leaves, of_value = self.leaves, self.of_value
        for node in nodes[len(self.of_node) :]:
            found: Place | None = None
            for v in node[1:]:
                place = of_value[v] if v >= 0 else leaves[-v - 1]
                if place is not None and place is not found:
                    if found is None or found is HERE:
                        found = place
                    elif place is not HERE:
                        found = HERE
                        break
            self.of_node.append(found)
            of_value += [found] * node[0].n_outs


def place(nodes: Nodes, leaves: Sequence[Place | None], results: Sequence[int], home: Place = HERE) -> list[Place]:
    """Where each node runs. leaves: where these lie; results: ids of the values that are needed; home: where, if no input says otherwise."""
    given = Inputs(leaves)
    given.follow(nodes)
    producer = [i for i, node in enumerate(nodes) for _ in range(node[0].n_outs)]
    found = given.of_node
    wanted: list[Place | None] = [None] * len(nodes)
    for v in results:
        wanted[producer[v]] = home
    for i in range(len(nodes) - 1, -1, -1):
        if found[i] is None:
            found[i] = HERE if _meets_others(nodes[i][0], wanted[i]) else wanted[i]
        here = found[i]
        if here is None:
            continue  # nothing needs it
        for v in nodes[i][1:]:
            if v >= 0:
                j = producer[v]
                wanted[j] = here if wanted[j] in (None, here) else HERE
    return [HERE if at is None else at for at in found]


def _meets_others(entry: Any, at: Place | None) -> bool:
    """Whether an op exchanges values between ranks at a place and others."""
    narrow = None if at is None else places.ranks(at.mesh)
    if narrow is None or not lowerings.is_collective(entry.op):
        return False
    text: str = entry.args[-1]
    if not text.startswith("["):
        return not narrow.at.keys().isdisjoint(text.split(","))
    there = set(narrow.order)
    return any(there.intersection(group) and not there.issuperset(group) for group in json.loads(text))
