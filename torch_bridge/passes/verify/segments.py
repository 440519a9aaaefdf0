"""Rules of a segment: every id names a leaf or an earlier value, lists name nodes that exist, storages and views fit the values that they wait for.

`check` looks at one segment, `check_slots` at the inputs that its numbers share.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from torch_bridge.ir import dtypes
from torch_bridge.ir.entry import Entry, Lift, Slot
from torch_bridge.ir.layout import Layout
from torch_bridge.ir.number_families import SLICES
from torch_bridge.ir.segment import Segment, Storage
from torch_bridge.mesh import sharding
from torch_bridge.passes.scalar_inputs import Slots
from torch_bridge.passes.verify import report
from torch_bridge.source import NOWHERE

Template = tuple[tuple[Slot | Lift, ...], int, tuple[type, ...]]


def check(segment: Segment, after: str) -> None:
    """Raise `VerificationError` for the first rule that a segment breaks."""
    _Check(segment, after).run()


@functools.lru_cache(maxsize=8192)
def template(entry: Entry) -> Template:
    """The places of an entry's call in the order in which they stand there, how many tensors it takes, and the types of its lifted numbers."""
    places = tuple(_places((entry.args, entry.kwargs)))
    kinds = {p.index: p.kind for p in places if isinstance(p, Lift)}
    return places, 1 + max((p.index for p in places if isinstance(p, Slot)), default=-1), tuple(kinds[k] for k in sorted(kinds))


def _places(x: Any) -> Iterator[Slot | Lift]:
    if isinstance(x, (Slot, Lift)):
        yield x
    elif isinstance(x, (list, tuple)):
        for y in x:
            yield from _places(y)
    elif isinstance(x, dict):
        for y in x.values():
            yield from _places(y)


Aval = tuple[tuple[int, ...], torch.dtype]

_READ: dict[Entry, tuple[Aval | None, ...]] = {}
"""What an entry was recorded on first: it is interned with the shapes and dtypes of its inputs, so it must always read the same."""
_MOST = 8192


def read_first(entry: Entry) -> tuple[Aval | None, ...] | None:
    """What an entry was recorded on, None if no segment with it has been looked at."""
    return _READ.get(entry)


class _Check:
    """One look at a segment. outs: the layout of every value; leaves: shape and dtype of every leaf; read: what is new for `_READ`."""

    def __init__(self, segment: Segment, after: str):
        self.segment, self.after = segment, after
        self.outs: list[Layout | None] = []
        self.read: dict[Entry, tuple[Aval | None, ...]] = {}
        self.leaves = [leaf_aval(segment, k) for k in range(len(segment.leaves))]

    def run(self) -> None:
        self._nodes()
        self._lists()
        self._leaves()
        for storage in self._storages():
            self._storage(storage)
        _READ.update(self.read)
        while len(_READ) > _MOST:
            del _READ[next(iter(_READ))]

    def fail(self, rule: str, found: str, node: int | None = None) -> None:
        segment = self.segment
        report.fail(self.after, rule, found, "" if node is None else report.in_segment(segment.nodes, segment.sources, node))

    def _nodes(self) -> None:
        leaves, outs = len(self.segment.leaves), self.outs
        for i, (entry, *ids) in enumerate(self.segment.nodes):
            takes = template(entry)[1]
            if len(ids) != takes:
                self.fail("a node has as many inputs as its op takes tensors", f"{len(ids)} inputs for {takes} tensors", i)
            for v in ids:
                if not -leaves <= v < len(outs):
                    self.fail(
                        "an input is a leaf or the result of an earlier node",
                        f"id {v} with {leaves} leaves and {len(outs)} values before",
                        i,
                    )
                if v >= 0 and outs[v] is None:
                    self.fail("an input has a value", f"id {v}, an undefined result", i)
            if len(entry.outs) != entry.n_outs or len(entry.paths) != entry.n_outs:
                self.fail(
                    "an op has a layout and a path for each result", f"{len(entry.outs)} and {len(entry.paths)} for {entry.n_outs}", i
                )
            given = tuple(self._aval(v) for v in ids)
            known = _READ.get(entry) or self.read.setdefault(entry, given)
            if known != given:
                self.fail("an op reads the shapes and dtypes that it was recorded for", f"{given} for {known}", i)
            outs.extend(entry.outs)
        if self.segment.next_vid != len(outs):
            self.fail("the next id is the number of results so far", f"{self.segment.next_vid} with {len(outs)} results")

    def _aval(self, v: int) -> Aval | None:
        if v < 0:
            return self.leaves[-v - 1]
        out = self.outs[v]
        return None if out is None else (out.size, out.dtype)

    def _lists(self) -> None:
        segment, nodes = self.segment, self.segment.nodes
        if len(segment.sources) != len(nodes):
            self.fail("every node has a source", f"{len(segment.sources)} sources of {len(nodes)} nodes")
        numbers = {i: tuple(map(type, values)) for i, values in segment.numbers}
        draws = {i for i, _, _ in segment.draws}
        for name, given, found in (("numbers", segment.numbers, numbers), ("draws", segment.draws, draws)):
            places = [x[0] for x in given]
            if places != sorted(found):
                self.fail(f"{name} name each node once, in order", str(places[:20]))
        for i, node in enumerate(nodes):
            kinds = template(node[0])[2]
            if numbers.pop(i, ()) != kinds:
                got = next((values for k, values in segment.numbers if k == i), ())
                self.fail("a node has the lifted numbers that its op takes", f"{got} for {[k.__name__ for k in kinds]}", i)
            if node[0].rng != (i in draws):
                self.fail("just the ops that draw random numbers have a draw", f"draws of nodes {sorted(draws)[:20]}", i)
        if numbers or (draws and max(draws) >= len(nodes)):
            self.fail("numbers and draws name nodes that exist", f"{sorted(numbers)} and {sorted(draws)[-3:]} with {len(nodes)} nodes")
        self._fills()

    def _fills(self) -> None:
        segment, first = self.segment, 0
        starts = []
        for node in segment.nodes:
            starts.append(first)
            first += node[0].n_outs
        for fill in segment.fills:
            if not 0 <= fill.node < len(starts) or starts[fill.node] != fill.vid or not 0 <= fill.leaves_before <= len(segment.leaves):
                self.fail("a fill names its node, the value of that, and leaves that exist", str(fill[:2] + fill[3:]))
            op = segment.nodes[fill.node][0].op
            if op is not torch.ops.aten.full.default:
                self.fail("the node of a fill is aten.full", str(op), fill.node)

    def _leaves(self) -> None:
        segment = self.segment
        leaves = range(-len(segment.leaves), 0)
        if segment.leaf_index != {id(array): -i - 1 for i, array in enumerate(segment.leaves)}:
            self.fail("the index of leaves has each leaf once, at its place", f"{len(segment.leaf_index)} entries for {len(leaves)} leaves")
        for name, ids in (("saved", segment.saved_leaves), ("holders", list(segment.holders))):
            wrong = [v for v in ids if v not in leaves]
            if wrong:
                self.fail(f"{name} name leaves", f"ids {wrong[:10]} with {len(leaves)} leaves")
        for v, ref in (*segment.holders.items(), *zip(segment.saved_leaves, segment.saved, strict=True)):
            storage = ref()
            if storage is not None:
                self._holds(v, storage)

    def _holds(self, leaf: int, storage: Storage) -> None:
        size, dtype = self.leaves[-leaf - 1]
        of = storage.layout
        if (size, dtype) != (of.size, of.dtype):
            self.fail("a leaf has the shape and dtype of the storage that it comes from", f"leaf {leaf}, {dtype}{list(size)}, for {of}")

    def _storages(self) -> list[Storage]:
        segment = self.segment
        found = (ref() for ref in (*segment.writers, *segment.holders.values()))
        return list({id(s): s for s in found if s is not None and s.segment is segment}.values())

    def _storage(self, storage: Storage) -> None:
        segment, of = self.segment, storage.layout
        if not -len(segment.leaves) <= storage.vid < len(self.outs):
            self.fail(
                "a storage waits for a value that exists", f"{storage.vid} with {len(segment.leaves)} leaves and {len(self.outs)} values"
            )
        if storage.vid >= 0:
            self._agrees(storage.vid, of, "a storage has the shape and dtype of the value that it waits for")
        else:
            self._holds(storage.vid, storage)
        for view, vid in (storage.views or {}).items():
            if not fits(view, of):
                self.fail("a view lies inside its storage", f"{view} of {of}")
            if not -len(segment.leaves) <= vid < len(self.outs):
                self.fail("a view that was read has a value", f"id {vid} for {view}")
            if vid >= 0:
                self._agrees(vid, view, "a view has the shape and dtype of the value that was read")

    def _agrees(self, vid: int, of: Layout, rule: str) -> None:
        out = self.outs[vid]
        if out is None or (out.size, out.dtype) != (of.size, of.dtype):
            self.fail(rule, f"{out} for {of}", producer(self.segment.nodes, vid))


def producer(nodes: Sequence[tuple[Any, ...]], vid: int) -> int:
    """The node that gives a value."""
    for i, node in enumerate(nodes):
        vid -= node[0].n_outs
        if vid < 0:
            return i
    raise AssertionError(vid)


def leaf_aval(segment: Segment, leaf: int) -> Aval:
    """The shape that each rank sees of a leaf, and its dtype."""
    array = segment.leaves[leaf]
    size = tuple(array.shape)
    if sharding.active() and hasattr(array, "sharding"):
        size = () if id(array) in segment.scalars else tuple(array.sharding.shard_shape(size))
    return size, dtypes.to_torch(array.dtype)


def fits(view: Layout, base: Layout) -> bool:
    """Whether all elements of a view lie in a storage."""
    if not view.numel:
        return True
    ends = [(n - 1) * s for n, s in zip(view.size, view.stride, strict=True)]
    low, high = view.offset + sum(min(e, 0) for e in ends), view.offset + sum(max(e, 0) for e in ends)
    return low >= 0 and (high + 1) * view.dtype.itemsize <= base.numel * base.dtype.itemsize


def check_slots(segment: Segment, nodes: Sequence[tuple[Any, ...]], slots: dict[type, Slots]) -> None:
    """After `scalar_inputs`: every lifted number has an input, which gives it back, and only places of the same op, argument and line share one."""
    after = "scalar_inputs"
    for kind, of in slots.items():
        places = [(i, k, value) for i, values in segment.numbers for k, value in enumerate(values) if type(value) is kind]
        inputs = len(of.first)
        if len(of.slot_of) != len(places):
            report.fail(after, f"every lifted {kind.__name__} has an input", f"{len(of.slot_of)} places for {len(places)} numbers")
        shared: dict[int, Any] = {}
        for at, (i, k, value) in enumerate(places):
            slot = int(of.slot_of[at])
            source = segment.sources[i] if i < len(segment.sources) else NOWHERE
            where = report.in_segment(nodes, segment.sources, i)
            if not 0 <= slot < inputs:
                report.fail(after, "a number's input exists", f"input {slot} of {inputs}", where)
            first = places[int(of.first[slot])][2]
            if repr(first) != repr(value):
                report.fail(after, "numbers that share an input are equal", f"{value!r} gets {first!r}", where)
            label = ("start" if nodes[i][0].op in SLICES else nodes[i][0].op, k, source.file, source.line)
            if shared.setdefault(slot, label) != label:
                report.fail(after, "numbers that share an input come from one op, argument and line", f"{shared[slot]}, {label}", where)
        if set(shared) != set(range(inputs)):
            report.fail(after, "every input is some number's", f"{inputs} inputs, used {sorted(shared)}")
