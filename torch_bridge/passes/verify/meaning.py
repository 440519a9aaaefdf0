"""What every live storage of a segment is computed from, whatever the ids: a rewrite must leave that alone."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from torch_bridge.ir.segment import Segment
from torch_bridge.passes.verify import report
from torch_bridge.source import NOWHERE


class Meaning:
    """What the live storages of a segment are computed from: values are numbered so that equal numbers are the same computation of the same arrays.

    Made before `hoist_constants`; `check` compares the segment after it. Constants that became leaves count as the constants that they were.
    """

    def __init__(self, segment: Segment):
        self._known: dict[Any, int] = {}
        self._arrays = {id(a) for a in segment.leaves}
        values, _ = self._values(segment, {})
        # a storage that is filled anew has several; the one it was born with becomes a leaf
        self._constants = {id(s): (s, values[f.vid], f.value) for f in segment.fills if f.born and (s := f.storage()) is not None}
        self._live = {id(s): (s, values[vid]) for vid, storages in segment.results().items() for s in storages}

    def check(self, segment: Segment, after: str) -> None:
        """Raise `VerificationError` if a storage waits for another computation than before, or a node has another source."""
        hoisted: dict[int, int] = {}
        for ref, leaf in segment.saved_with_leaves():
            storage = ref()
            if storage is not None and id(segment.leaves[-leaf - 1]) not in self._arrays and id(storage) in self._constants:
                hoisted[leaf] = self._constants[id(storage)][1]
                self._full(segment, leaf, self._constants[id(storage)][2], after)
        values, nodes = self._values(segment, hoisted)
        after_live = {id(s): vid for vid, storages in segment.results().items() for s in storages}
        for key, (storage, number) in self._live.items():
            vid = after_live.get(key)
            if vid is None:
                report.fail(after, "every storage still waits for its value", f"one of {storage.layout} does not")
            if values[vid] != number:
                where = report.in_segment(segment.nodes, segment.sources, nodes[vid])
                report.fail(after, "every storage waits for the same computation as before", f"another one for {storage.layout}", where)

    def _full(self, segment: Segment, leaf: int, value: Any, after: str) -> None:
        array = segment.leaves[-leaf - 1]
        if isinstance(array, jax.Array) and array.is_fully_addressable and array.size:
            shard = np.asarray(array.addressable_shards[0].data).reshape(-1)
            if len(shard) <= _SMALL and not np.array_equal(shard, np.full_like(shard, value), equal_nan=shard.dtype.kind in "fc"):
                report.fail(after, "a constant that became a leaf is full of its number", f"{shard[:5]} for {value}")

    def _values(self, segment: Segment, hoisted: dict[int, int]) -> tuple[list[int], list[int]]:
        """The number of every value, and the node of every value."""
        numbers, draws = dict(segment.numbers), {i: rest for i, *rest in segment.draws}
        values: list[int] = []
        nodes: list[int] = []
        for i, (entry, *ids) in enumerate(segment.nodes):
            given = tuple(values[v] if v >= 0 else hoisted.get(v, -1 - id(segment.leaves[-v - 1])) for v in ids)
            source = segment.sources[i] if i < len(segment.sources) else NOWHERE
            key = (id(entry), given, repr(numbers.get(i, ())), repr(draws.get(i, ())), source.file, source.line)
            for k in range(entry.n_outs):
                values.append(self._known.setdefault((key, k), len(self._known)))
                nodes.append(i)
        return values, nodes


_SMALL = 4096
"""Elements up to which a new leaf's contents are looked at."""
