"""The Python numbers of a recorded step as inputs of its program: few, although a step has hundreds.

An optimizer passes the same learning rate for every parameter. Places in the graph that come from the same op, argument and source line and had the same
number when the program was compiled share one input; every run checks that they still agree, and a program with finer sharing is compiled if not. Starts of
slices share one whatever the op, so that `x[i : i + 4] += 1` is seen to write where it reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from torch_bridge.ir.number_families import SLICES
from torch_bridge.source import NOWHERE, Source

Numbers = Sequence[tuple[int, tuple[Any, ...]]]
"""(node index, its numbers) as a segment records them."""

_DTYPES = {float: np.float64, int: np.int64}
_NONE = {kind: np.array([], dtype) for kind, dtype in _DTYPES.items()}


def flat(numbers: Numbers, kind: type) -> np.ndarray:
    """All numbers of one Python type in order, as float64 or int64."""
    if not numbers:
        return _NONE[kind]
    return np.array([v for _, values in numbers for v in values if type(v) is kind], dtype=_DTYPES[kind])


def packed_draws(draws: Iterable[tuple[int, int]]) -> np.ndarray:
    """Seeds and offsets of draws of random numbers, as programs take them: uint32 [draws, 4]."""
    return np.array([(s >> 32, s & 0xFFFFFFFF, o >> 32, o & 0xFFFFFFFF) for s, o in draws], dtype=np.uint32)


class Slots:
    """Which inputs the places of one kind of number share: `slot_of` for each place, `first` the first place of each slot."""

    def __init__(self, labels: list[Any]):
        seen: dict[Any, int] = {}
        self.slot_of = np.array([seen.setdefault(label, len(seen)) for label in labels], dtype=np.intp)
        self.first = np.array([labels.index(label) for label in seen], dtype=np.intp)

    def pack(self, values: np.ndarray) -> np.ndarray | None:
        """One number for each slot, or None if places that share a slot differ (bit by bit) this time."""
        if not len(values):
            return values
        packed = values[self.first]
        if (packed.view(np.int64)[self.slot_of] == values.view(np.int64)).all():
            return packed
        return None


def share(
    nodes: Sequence[tuple[Any, ...]], sources: Sequence[Source], numbers: Numbers, finer_than: Sequence[Mapping[type, Slots]]
) -> dict[type, Slots]:
    """Slots for the numbers of a segment, by kind; places that `finer_than` (slots of programs that did not fit) kept apart stay apart."""
    return {kind: Slots(_labels(nodes, sources, numbers, kind, [slots[kind] for slots in finer_than])) for kind in _DTYPES}


def _kind(entry: Any) -> Any:
    """What places of a number have in common: their op, or that a slice starts there, to be read or written."""
    return "start" if entry.op in SLICES else entry.op


def _labels(nodes: Any, sources: Sequence[Source], numbers: Numbers, kind: type, coarser: Sequence[Slots]) -> list[Any]:
    labels: list[Any] = []
    for index, values in numbers:
        source = sources[index] if index < len(sources) else NOWHERE
        for position, value in enumerate(values):
            if type(value) is kind:
                before = tuple(int(s.slot_of[len(labels)]) for s in coarser)
                labels.append((_kind(nodes[index][0]), position, source.file, source.line, repr(value), before))
    return labels
