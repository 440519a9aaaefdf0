"""Which chip is wired to which, how fast the wires are, and how many of them lie between two chips.

Chips of an instance are numbered node by node: in an UltraServer chip 17 is chip 1 of the second node.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import cache

import numpy as np

from nxd_jax.topology.instances import Instance


@dataclass(frozen=True)
class Link:
    """A NeuronLink between two chips of one instance.

    Attributes:
        chips: the two chip numbers, smaller first.
        axis: "x" along a row, "y" along a column, "z" between nodes of an UltraServer, "ring" on ring-wired instances.
        bandwidth: bytes/s. The documents do not say whether that is one direction or both together.
        wraps: whether it closes a row, column or ring (last chip back to the first).
    """

    chips: tuple[int, int]
    axis: str
    bandwidth: float
    wraps: bool


def _around(position: int, size: int, step: int) -> int | None:
    return (position + step) % size if size > 1 else None


def _in_node(grid: tuple[int, ...], chip: int) -> list[int]:
    """Neighbours on the same node, in the order `neuron-ls` prints: up, left, down, right; on a ring: previous, next."""
    if len(grid) == 1:
        around = [_around(chip, grid[0], -1), _around(chip, grid[0], 1)]
    else:
        rows, columns = grid
        row, column = divmod(chip, columns)
        around = [
            columns * ((row - 1) % rows) + column,
            columns * row + (column - 1) % columns,
            columns * ((row + 1) % rows) + column,
            columns * row + (column + 1) % columns,
        ]
    return [c for c in around if c is not None]


@cache
def neighbours(instance: Instance) -> tuple[tuple[int, ...], ...]:
    """For each chip of the instance the chips that it has a link to.

    The order within a node is the one `neuron-ls` prints in CONNECTED DEVICES: up, left, down, right on the torus; previous, next on the
    rings of inf2. In an UltraServer two more follow, the same chip on the previous and on the next node (the documents state that ring,
    and no order for it). A single chip has none.
    """
    size, rows = instance.chips_per_node, []
    for node in range(instance.nodes):
        for chip in range(size):
            row = [node * size + c for c in _in_node(instance.grid, chip)]
            row += [n * size + chip for n in (_around(node, instance.nodes, -1), _around(node, instance.nodes, 1)) if n is not None]
            rows.append(tuple(row))
    return tuple(rows)


@cache
def links(instance: Instance) -> tuple[Link, ...]:
    """Every link of the instance once, in the order of its smaller and then its larger chip number."""
    pairs = sorted({(min(a, b), max(a, b)) for a, row in enumerate(neighbours(instance)) for b in row})
    return tuple(_link(instance, a, b) for a, b in pairs)


def _link(instance: Instance, a: int, b: int) -> Link:
    size, chip = instance.chips_per_node, instance.chip
    if a // size != b // size:
        assert chip.z_link_bandwidth is not None
        return Link((a, b), "z", chip.z_link_bandwidth, wraps=b // size - a // size > 1)
    if len(instance.grid) == 1:
        return Link((a, b), "ring", chip.link_bandwidth, wraps=b - a > 1)
    columns = instance.grid[1]
    if b - a < columns:
        return Link((a, b), "x", chip.link_bandwidth, wraps=b - a > 1)
    return Link((a, b), "y", chip.link_bandwidth, wraps=b - a > columns)


@cache
def hops(instance: Instance) -> np.ndarray:
    """Links between any two chips of the instance by the shortest way: an integer array of shape [chips, chips], read-only."""
    table, chips = neighbours(instance), instance.chips
    distance = np.full((chips, chips), -1)
    for start in range(chips):
        distance[start, start] = 0
        waiting = deque([start])
        while waiting:
            here = waiting.popleft()
            for there in table[here]:
                if distance[start, there] < 0:
                    distance[start, there] = distance[start, here] + 1
                    waiting.append(there)
    distance.flags.writeable = False
    return distance


def connected(instance: Instance, chips: set[int]) -> bool:
    """Whether data can go between all of `chips` over links among them alone."""
    if not chips:
        return True
    table, start = neighbours(instance), min(chips)
    seen, waiting = {start}, [start]
    while waiting:
        fresh = (set(table[waiting.pop()]) & chips) - seen
        seen |= fresh
        waiting += fresh
    return seen == chips
