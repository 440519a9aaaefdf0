"""Small integer values that Python asks for, computed on the host without cutting the graph.

Model code often branches on a few integers it has just made (`if (mask == 1).all()`, `position_ids[0, -1].item()`). Where such a value depends only on a
handful of small integer or bool tensors whose leaves are at hand, eager torch computes exactly the same number at once, and the segment stays whole. Of
leaves that differ among ranks each rank's value is computed: they must agree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from torch_bridge import metrics
from torch_bridge.ir import dtypes
from torch_bridge.ir.entry import Entry
from torch_bridge.ir.graph import fill
from torch_bridge.ir.layout import Layout
from torch_bridge.ir.segment import Segment, Storage
from torch_bridge.ir.view_entries import read_entries
from torch_bridge.mesh import sharding, spmd, world
from torch_bridge.precision import precision_mode

if TYPE_CHECKING:
    import jax

aten = torch.ops.aten

MAX_NODES = 64
MAX_ELEMENTS = 1 << 19
"""Of any tensor on the way to a value: a mask for 32 sequences of 16,384 tokens, half a millisecond of eager torch."""
SEARCH = 20_000
"""How many nodes back the value's inputs may lie: to walk there takes less than a millisecond."""
EXACT = 256
"""Whole numbers up to here are the same in float32 and in every lower precision."""

_FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_MOVING = frozenset({
    "view", "reshape", "_unsafe_view", "permute", "transpose", "t", "expand", "unsqueeze", "squeeze", "select", "slice", "alias", "detach", "clone", "flip",
    "cat", "stack", "index", "index_select", "gather", "as_strided", "select_scatter", "slice_scatter", "as_strided_scatter",
})  # fmt: skip
_COUNTING = frozenset({"_to_copy", "add", "sub", "rsub", "mul", "neg", "where", "masked_fill", "fill", "full", "full_like", "index_put"})
_PLAIN = frozenset(
    {"_to_copy", "add", "sub", "rsub", "mul", "div", "neg", "reciprocal", "fill", "full", "full_like", "maximum", "minimum", "clamp"}
)
_INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_OTHERS = 1 << 40
"""From here on: ids of values that are not in the segment."""


def known(segment: Segment, storage: Storage, view: Layout) -> torch.Tensor | None:
    """The value of an integer or bool tensor that waits in the segment as a CPU tensor, or None if it takes the device to know it, or nothing waits.

    Who records the segment (`tape`) is told of it, also where nothing waits, as the value may be another in the next call.
    """
    recording, work = segment.recording, Work(segment)
    if recording is not None and (not storage.pending or recording.has_still(storage)):
        at = work.view(storage, view)
        found = None if at is None else work.results([at])
        if found is not None:
            recording.got_view(storage, view, found[0])
    elif storage.segment is segment and storage.pending:
        vid = segment.read(storage, view)
        found = work.results([vid]) if work.value(vid) else None
        if found is not None and recording is not None:
            recording.got_value(vid, found[0], 0 if work.leaves else 1 + work.first)
    else:
        return None
    if found is None:
        return None
    metrics.count("host::small_integers")
    return found[0]


def known_untold(segment: Segment, storage: Storage, view: Layout) -> torch.Tensor | None:
    """As `known`, for a tensor that waits and may have many elements, also where it compares floats that are at hand (`labels > 0`).

    A recording is not told: whoever asks has told it that Python asks (`asked`).
    """
    if storage.segment is not segment or not storage.pending:
        return None
    return Work(segment, floats=True).only(segment.read(storage, view))


def number(segment: Segment, storage: Storage, view: Layout) -> torch.Tensor | None:
    """A float that waits in the segment and is made of single numbers at hand (`1 / (steps + 1)`), as eager torch computes it; None for any other.

    A recording is not told, as for `known_untold`. Where floats of the device are rounded otherwise, nothing is.
    """
    if storage.segment is not segment or not storage.pending or precision_mode.current() != precision_mode.PLAIN:
        return None
    return Work(segment, cheap=_plain).only(segment.read(storage, view))


class Work:
    """Ops to be computed on the host, by the ids of values in a segment. leaves: the arrays they start from, with a rank's shape; first: the first node.

    floats: these may be floats that ops move or compare, which is exact wherever it is done. cheap: which ops may be on the way.
    """

    def __init__(self, segment: Segment, floats: bool = False, cheap: Callable[[Entry], bool] | None = None):
        self._floats, self._cheap = floats, cheap or _cheap
        self.leaves: dict[int, tuple[Any, tuple[int, ...]]] = {}
        self.first = len(segment.nodes)
        self._segment = segment
        self._steps: list[tuple[Entry, Sequence[int], Sequence[Any], int]] = []
        self._known: dict[int, torch.Tensor] = {}
        self._next = _OTHERS
        self._added: set[int] = set()

    def value(self, vid: int) -> bool:
        """Add what a value of the segment depends on; False if that is too much, or not integer."""
        if vid < 0:
            array = self._segment.leaves[-vid - 1]
            return self._leaf(vid, array, () if id(array) in self._segment.scalars else None)
        cone = _cone(self._segment, vid, self._cheap)
        if cone is None:
            return False
        for index, first in cone:
            entry, *inputs = self._segment.nodes[index]
            if not all(self.value(v) for v in inputs if v < 0):
                return False
            if index not in self._added:
                self._added.add(index)
                self._steps.append((entry, inputs, next((n for i, n in self._segment.numbers if i == index), ()), first))
        self.first = min(self.first, cone[0][0])
        return True

    def only(self, vid: int) -> torch.Tensor | None:
        """A value of the segment, and nothing else; None as for `value` and `results`."""
        found = self.results([vid]) if self.value(vid) else None
        return None if found is None else found[0]

    def view(self, storage: Storage, view: Layout) -> int | None:
        """Add what a view of a storage shows; its id, or None as for `value`."""
        base = storage.layout
        if storage.segment is self._segment:
            at, known = storage.vid, self.value(storage.vid)
        else:
            at = self._new(1)
            known = self._full(at, storage) if storage.constant else self._leaf(at, storage.held, base.size)
        if not known:
            return None
        for entry in read_entries(base, view):
            at = self.add(entry, (at,))
        return at

    def add(self, entry: Entry, inputs: Sequence[int], numbers: Sequence[Any] = ()) -> int:
        """Add an op on values that are known by then; the id of its first result."""
        first = self._new(entry.n_outs)
        self._steps.append((entry, inputs, numbers, first))
        return first

    def results(self, wanted: Sequence[int]) -> list[torch.Tensor] | None:
        """These values; None where ranks have different ones, where only other processes know whether they do, where the device may round otherwise, and where
        torch has no CPU kernel for these dtypes (a histogram of integers).
        """
        ranks = self._ranks()
        found: list[list[torch.Tensor]] = []
        for rank in ranks:
            values = {**self._known, **{v: _on_host(array, rank, size) for v, (array, size) in self.leaves.items()}}
            for entry, inputs, numbers, first in self._steps:
                try:
                    _compute(entry, [values[v] for v in inputs], numbers, first, values)
                except NotImplementedError:
                    return None
                if self._cheap is _cheap and _counts(entry) and not all(_exact(values[first + k]) for k in range(entry.n_outs)):
                    return None
            found.append([values[v] for v in wanted])
        if not found or not all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True)):
            return None
        return found[0]

    def _new(self, count: int) -> int:
        self._next += count
        return self._next - count

    def _full(self, at: int, storage: Storage) -> bool:
        base = storage.layout
        if base.dtype not in _INTEGERS or base.numel > MAX_ELEMENTS:
            return False
        self._known[at] = torch.full(base.size, storage.fill, dtype=base.dtype)
        return True

    def _leaf(self, vid: int, array: Any, size: tuple[int, ...] | None) -> bool:
        """size: a rank's shape, if the array's own does not say it."""
        if not hasattr(array, "is_deleted") or array.is_deleted():
            return False  # (a captured module's input has no value)
        size = tuple(array.sharding.shard_shape(array.shape)) if size is None else size
        floats = self._floats or (self._cheap is _plain and torch.Size(size).numel() == 1)
        if (dtype := dtypes.to_torch(array.dtype)) not in _INTEGERS and not (floats and dtype in _FLOATS):
            return False
        if torch.Size(size).numel() > MAX_ELEMENTS:
            return False
        self.leaves[vid] = array, size
        return True

    def _ranks(self) -> list[int]:
        """Ranks of which every other one is like one; none if that cannot be said here."""
        if not sharding.active():
            return [0]
        axes = {a for array, _ in self.leaves.values() for a in sharding.axes_of(sharding.spec_of(array))}
        hosted = world.current().hosted
        if axes and 1 < len(hosted) < world.current().size:  # other processes would have to say the same
            return []
        places = [world.coordinates(a) for a in axes]
        return list({tuple(p[rank] for p in places): rank for rank in reversed(hosted)}.values())


def _compute(entry: Entry, inputs: Sequence[torch.Tensor], numbers: Sequence[Any], first: int, values: dict[int, torch.Tensor]) -> None:
    args, kwargs = fill((entry.args, entry.kwargs), inputs, numbers)
    out = entry.op(*args, **kwargs)
    for k, path in enumerate(entry.paths):
        value = out
        for step in path:
            value = value[step]
        cast = entry.casts[k] if entry.casts else None
        values[first + k] = _as_array(value if cast is None else value.to(cast))


def _as_array(t: torch.Tensor) -> torch.Tensor:
    """As a program has it, whose values have no strides: `view` and `as_strided` go by them."""
    return t if t.is_contiguous() and not t.storage_offset() else t.clone(memory_format=torch.contiguous_format)


def _on_host(array: jax.Array, rank: int, size: tuple[int, ...]) -> torch.Tensor:
    from torch_bridge.runtime.transfer import from_numpy

    return from_numpy(np.array(sharding.block(array, rank, size) if sharding.active() else spmd.whole(array)))


def _cone(segment: Segment, vid: int, cheap: Callable[[Entry], bool]) -> list[tuple[int, int]] | None:
    """(node index, id of its first result) of everything `vid` depends on, in order; None if it is more than `cheap` ops."""
    needed = {vid}
    cone: list[tuple[int, int]] = []
    nodes, index, at = segment.nodes, len(segment.nodes), segment.next_vid
    while needed:
        last = max(needed)
        while at > last:
            index -= 1
            at -= nodes[index][0].n_outs
        entry = nodes[index][0]
        if not cheap(entry) or len(cone) == MAX_NODES or len(nodes) - index > SEARCH:
            return None
        needed.difference_update(range(at, at + entry.n_outs))
        needed.update(v for v in nodes[index][1:] if v >= 0)
        cone.append((index, at))
    return cone[::-1]


def _cheap(entry: Entry) -> bool:
    if entry.rng or entry.op.namespace != "aten" or not all(o is not None and o.numel <= MAX_ELEMENTS for o in entry.outs):
        return False
    return _counts(entry) or _moves(entry) or all(o is not None and o.dtype in _INTEGERS for o in entry.outs)


def _plain(entry: Entry) -> bool:
    """Whether it makes single numbers of others with an operation that every machine rounds alike."""
    if entry.rng or entry.op.namespace != "aten" or not all(o is not None and o.numel == 1 for o in entry.outs):
        return False
    return entry.op._schema.name.removeprefix("aten::") in _PLAIN or _moves(entry)


def _counts(entry: Entry) -> bool:
    """Whether it may make floats that are whole numbers, as masks in the making are: looked at when they are computed (`_exact`)."""
    return entry.op._schema.name.removeprefix("aten::") in _COUNTING and any(o is not None and o.dtype in _FLOATS for o in entry.outs)


def _exact(t: torch.Tensor) -> bool:
    """Whether every precision has these numbers: whole ones, and the ends of what a dtype holds."""
    if t.dtype not in _FLOATS:
        return True
    ends = torch.finfo(t.dtype)
    return bool((((t == t.round()) & (t.abs() <= EXACT)) | (t <= ends.min) | (t >= ends.max)).all())


def _moves(entry: Entry) -> bool:
    """Whether values stay what they are, floats of leaves, too."""
    return entry.op._schema.name.removeprefix("aten::") in _MOVING and not entry.casts
