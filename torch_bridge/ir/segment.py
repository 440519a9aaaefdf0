"""The list of recorded ops that waits to be compiled and run: nodes, the arrays they read, and the storages they write.

A value is named by an integer: node outputs count up from 0, leaves (arrays that exist already) count down from -1. A node is the
tuple `(entry, *input ids)`; an `Entry` is one aten call with everything but its tensors fixed, interned, so that two
recordings of the same step are equal lists, whatever arrays they run on.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter, call
from typing import Any, ClassVar, NamedTuple, Protocol

import torch

from torch_bridge import source
from torch_bridge.errors import DeadTensorError
from torch_bridge.identity import all_are, any_is, same
from torch_bridge.ir import number_families
from torch_bridge.ir.entry import Entry
from torch_bridge.ir.layout import Layout
from torch_bridge.ir.view_entries import constant_entry, full_entry, read_entries, write_entries
from torch_bridge.mesh import sharding, spmd

aten = torch.ops.aten

Foretell = Callable[[], tuple[float, ...] | None]
"""Says which numbers a node will have in the next step; None: nobody knows."""
NEVER = sys.maxsize
"""`Segment.start_at` where nothing is to start."""

LOCK = threading.RLock()
"""Held while an op is recorded and while a segment runs: any thread may use the device."""


class Facts:
    """What few storages have. owner: (weak module, name, the axes of the ranks then) of the parameter it belongs to.

    spec: how the blocks of the ranks lie in the global array; axes in it are expected to differ. start: how they lie if a step that creates the storage
    full of one number gets it as an input (`hoist_constants`); home: the place (`mesh.places`) at which that is then.
    links: storages that alias this one in a way that
    layouts cannot say (`rank_ops`): each is called with (segment, storage) after a write and writes the other side. origin: which op made the value on the
    host, and the line that called it. cpu: it stands for a tensor on the CPU (`cpu_draws`).
    """

    __slots__ = ("cpu", "home", "keep", "links", "origin", "owner", "spec", "start")

    def __init__(self) -> None:
        self.owner: Any = None
        self.spec: Any = None
        self.start: Any = None
        self.home: Any = None
        self.links: list[Any] = []
        self.keep: Any = None
        self.origin = ""
        self.cpu = False


class Storage:
    """What several views share: the current value, either a JAX array or the id of a pending value.

    layout: base layout, the shape in which the value is kept.
    held: the value if it exists, a JAX array or a row of one (`stacked_arrays.Row`), else None.
    array: the same as an array, a copy if it is a row.
    segment, vid: where the value is a node output (vid >= 0) or has been adopted as a leaf (vid < 0).
    views: ids of views read so far.
    writes: how often it has got another value, through views and `.data` as well, which torch's versions of tensors do not all count.
    ref: a weak reference to it. Segments name the storages of each step by theirs: kept here, they are not made anew.

    A storage with neither array nor segment is full of one number, `fill` (0 for `torch.empty`); `born_full` if it never held anything else.
    `witness(storage, new)`, if there is one, is told of every new storage and of every one that is filled (`tape`).
    """

    __slots__ = ("__weakref__", "born_full", "facts", "fill", "held", "layout", "ref", "segment", "vid", "views", "writes")

    witness: ClassVar[Callable[[Storage, bool], None] | None] = None

    def __init__(self, layout: Layout, array: Any = None, fill: Any = 0):
        self.layout = layout
        self.held = array
        self.fill = fill
        self.born_full = array is None
        self.segment: Any = None
        self.vid = -1
        self.views: dict[Layout, int] | None = None
        self.writes = 0
        self.ref = weakref.ref(self)
        self.facts: Facts | None = None
        if Storage.witness is not None:
            Storage.witness(self, True)

    @property
    def array(self) -> Any:
        """The value as an array of its own, None if there is none."""
        return sharding.alone(self.held)

    @array.setter
    def array(self, array: Any) -> None:
        self.held = array

    def describe(self, **facts: Any) -> None:
        """Add to `facts`."""
        if self.facts is None:
            self.facts = Facts()
        for name, value in facts.items():
            setattr(self.facts, name, value)

    @property
    def spec(self) -> Any:
        """`Facts.spec`, None without."""
        return None if self.facts is None else self.facts.spec

    def lie_as(self, other: Storage) -> None:
        """Lie among the ranks as another storage does: this is a copy of it, or a conversion."""
        if other.spec is not None:
            self.describe(spec=other.spec)

    @property
    def pending(self) -> bool:
        """True while the value waits in a segment."""
        return self.segment is not None and self.vid >= 0

    @property
    def constant(self) -> bool:
        """True while the storage is full of `fill` and nothing has been computed for it."""
        return self.held is None and self.segment is None

    def set_constant(self, fill: Any) -> None:
        """Fill the whole storage with one number; nothing is recorded until it is read."""
        if Storage.witness is not None:
            Storage.witness(self, False)
        self.born_full = self.born_full and self.constant
        self.writes += 1
        self.fill = fill
        self.held = None
        self.segment = None
        self.views = None

    def settle(self, array: Any) -> None:
        """The pending value has been computed."""
        self.held = array
        self.segment = None
        self.views = None


_LAYOUT, _SEGMENT, _VID, _HELD, _FACTS, _REF = map(attrgetter, ("layout", "segment", "vid", "held", "facts", "ref"))


class Results(Mapping[int, Sequence[Storage]]):
    """Storages by the pending id that they wait for. one: one for each id; others: more of the same."""

    def __init__(self, one: dict[int, Storage], others: dict[int, list[Storage]] | None = None):
        self.one = one
        self.others = {} if others is None else others

    def __getitem__(self, vid: int) -> Sequence[Storage]:
        return (self.one[vid], *self.others.get(vid, ()))

    def __iter__(self) -> Iterator[int]:
        return iter(self.one)

    def __len__(self) -> int:
        return len(self.one)

    @classmethod
    def of(cls, waiting: Iterable[tuple[int, Storage]]) -> Results:
        """Of storages, each with the id that it waits for; some may be there several times."""
        one: dict[int, Storage] = {}
        others: dict[int, list[Storage]] = {}
        for vid, storage in waiting:
            if one.setdefault(vid, storage) is not storage and storage not in others.setdefault(vid, []):
                others[vid].append(storage)
        return cls(one, others)

    def only(self, vids: Iterable[int]) -> Results:
        """Those of some ids."""
        found = [v for v in vids if v in self.one]
        return Results({v: self.one[v] for v in found}, {v: self.others[v] for v in found if v in self.others})

    def drop(self, vid: int) -> None:
        """Nothing waits for this one."""
        del self.one[vid]
        self.others.pop(vid, None)

    def settle(self, vids: Sequence[int], values: Sequence[Any]) -> None:
        """Their values have been computed; there may be some that nothing waits for."""
        for storage, value in zip(map(self.one.get, vids), values, strict=True):
            if storage is not None:
                storage.settle(value)
        if self.others:
            for vid, value in zip(vids, values, strict=True):
                for storage in self.others.get(vid, ()):
                    storage.settle(value)


class Fill(NamedTuple):
    """Where a constant storage was first read: its node and value ids, the leaves adopted before, the number, and whether it was born constant."""

    node: int
    vid: int
    storage: weakref.ref[Storage]
    leaves_before: int
    value: Any
    born: bool


class Renumbering(NamedTuple):
    """A rewrite of a segment.

    nodes: what it has now, with the new ids. leaves: its arrays now. node_of, value_of, leaf_of: the new place of each node that is kept, and the new ids of
    values and of leaves, by the old ones.
    """

    nodes: list[tuple[Any, ...]]
    leaves: list[Any]
    node_of: dict[int, int]
    value_of: dict[int, int]
    leaf_of: dict[int, int]


class Owner(Protocol):
    """Who records a segment (`runtime.session.Session`)."""

    def finish(self, segment: Segment) -> None:
        """Run it, if it is still pending."""


class Segment:
    """Recorded ops that have not run yet. All methods expect the caller to hold `LOCK`.

    Attributes:
        nodes: the ops, as (entry, *input ids).
        sources: where each was called, as far as no prediction says so.
        numbers: lifted Python numbers, as (node, its numbers); draws: seeds of random ops, as (node, seed, offset).
        next_vid: the id of the next value.
        leaves: the arrays that nodes read; leaf_index: the id of each by its `id()`; scalars: `id()`s of those that a rank sees as numbers.
        holders: from which storage a leaf was adopted last; sharers: which others it was adopted from.
        kept: arrays that no program may overwrite.
        writers: storages that were written, as often as they were.
        saved, saved_leaves: for a failed run: storages, and the ids of the leaves that they held before; overwritten: others, with the arrays that nothing had
            read (None: they were constant).
        fills: constants that were read.
        followed: at which places its values lie, as far as somebody asked (`recorder.placed`).
        home: the place at which nodes run whose inputs lie at none, if its results are needed there or nobody knows where; None: the mesh of the world.
        predicted: a trace seen before that the nodes so far agree with: as long as they do, nothing needs to be looked up.
        by_start: finds such a trace from the first node.
        foretold: nodes with what says the numbers that they will have in the next step, as (node, function without arguments).
        start_at, start: the node with which everything is known that the step takes, and what then starts its program (`runtime.speculation`).
        watch: told of every read as (storage, view, id), with view None of every write, and with storage None when Python asks for a value.
        recording: what records it, if something does (`replay.tape`).
        capture: it records a module for `torch_bridge.capture`, and never runs. known: gives a storage its value all the same, if it can; None: none has one.
        owner: the session that records it: another one that needs a value of it has it finished there.
        deferred: what of it is still to run (`runtime.executor.Deferred`).
        failure: why its run failed. lost: why values of it were not computed.
    """

    def __init__(self, capture: bool = False, by_start: dict[Any, Any] | None = None, owner: Owner | None = None):
        self.capture = capture
        self.known: Callable[[Storage], bool] | None = None
        self.owner = owner
        self.by_start = {} if by_start is None else by_start
        self.failure: str | None = None
        self.lost: str | None = None
        self.deferred: Any = None
        self.watch: Any = None
        self.recording: Any = None
        self.clear()

    def clear(self) -> None:
        """Forget everything recorded, and let go of the arrays."""
        self.nodes: list[tuple[Any, ...]] = []
        self.numbers: list[tuple[int, tuple[Any, ...]]] = []
        self.draws: list[tuple[int, int, int]] = []
        self.sources: list[source.Source] = []
        self.next_vid = 0
        self.leaves: list[Any] = []
        self.leaf_index: dict[int, int] = {}
        self.holders: dict[int, weakref.ref[Storage]] = {}
        self.sharers: list[weakref.ref[Storage]] = []
        self.kept: list[Any] = []
        self.scalars: set[int] = set()
        self.writers: list[weakref.ref[Storage]] = []
        self.saved: list[weakref.ref[Storage]] = []
        self.saved_leaves: list[int] = []
        self.overwritten: list[tuple[weakref.ref[Storage], Any]] = []
        self.fills: list[Fill] = []
        self.followed: Any = None
        self.home: Any = None
        self.predicted: Any = None
        self.foretold: list[tuple[int, Foretell]] = []
        self.start_at = NEVER
        self.start: Callable[[Segment], None] | None = None

    # -- values ---------------------------------------------------------------------------------

    def emit(self, entry: Entry, ids: tuple[int, ...], numbers: tuple[Any, ...] = (), draw: Any = None) -> int:
        """Append a node; returns the id of its first result. draw: (seed, offset[, mesh axes]) of a random op.

        An op's own numbers may be inputs by now (`number_families`); a captured graph has constants, whatever ran before.
        """
        if entry.family is not None and not self.capture:
            entry, own = number_families.recorded(entry)
            numbers = own or numbers
        if draw is not None and len(draw) == 3:
            entry = entry.varied(draw[2])
            draw = draw[:2]
        node = (entry, *ids)
        nodes = self.nodes
        i = len(nodes)
        predicted = self.predicted
        if i == 0:
            if predicted is None or predicted.nodes[0] != node:
                predicted = self.predicted = self.by_start.get(node)
        elif predicted is not None and (i >= len(predicted.nodes) or predicted.nodes[i] != node):
            self.sources = list(predicted.sources[:i])
            predicted = self.predicted = None
        if predicted is None:
            here = source.current(2)
            source.note_forward(here)
            del self.sources[i:]
            self.sources.append(here)
        else:
            source.note_predicted(predicted.sources, i)
        if numbers:
            while self.numbers and self.numbers[-1][0] >= i:
                self.numbers.pop()
            self.numbers.append((i, numbers))
        if draw is not None:
            while self.draws and self.draws[-1][0] >= i:
                self.draws.pop()
            self.draws.append((i, *draw))
        vid = self.next_vid
        self.next_vid = vid + entry.n_outs
        nodes.append(node)
        if i >= self.start_at:
            self._start()
        return vid

    def splice(
        self,
        nodes: list[tuple[Any, ...]],
        values: int,
        numbers: Iterable[tuple[int, tuple[Any, ...]]],
        draws: Iterable[tuple[int, int, int]],
        sources: Iterable[source.Source],
    ) -> None:
        """Append nodes as they are, with `values` results in all; numbers and draws name them from 0. Nobody may change the list of nodes later."""
        i = len(self.nodes)
        if nodes and i == 0 and (self.predicted is None or self.predicted.nodes[0] != nodes[0]):
            self.predicted = self.by_start.get(nodes[0])
        predicted = self.predicted
        if predicted is not None and predicted.agreed.get(i) is not nodes:
            if list(predicted.nodes[i : i + len(nodes)]) == nodes:
                predicted.agreed[i] = nodes
            else:
                self.sources = list(predicted.sources[:i])
                predicted = self.predicted = None
        if predicted is None:
            del self.sources[i:]
            self.sources.extend(sources)
        while self.numbers and self.numbers[-1][0] >= i:
            self.numbers.pop()
        self.numbers.extend((i + k, given) for k, given in numbers)
        while self.draws and self.draws[-1][0] >= i:
            self.draws.pop()
        self.draws.extend((i + k, seed, offset) for k, seed, offset in draws)
        self.nodes.extend(nodes)
        self.next_vid += values
        if len(self.nodes) > self.start_at:
            self._start()

    def _start(self) -> None:
        self.start_at = NEVER
        if self.start is not None:
            self.start(self)

    def unpredict(self) -> None:
        """Go on without the prediction, with the sources of what it foretold so far."""
        if self.predicted is not None:
            self.sources = list(self.predicted.sources[: len(self.nodes)])
            self.predicted = None

    def asked(self) -> None:
        """Python asks for a tensor's value."""
        if self.watch is not None:
            self.watch(None, None, 0)

    def adopt(self, storage: Storage) -> int:
        """The id of a storage's current value, making its array a leaf if it has one."""
        if storage.segment is not None and storage.vid >= 0:  # `pending`, without a call
            self._finish_other(storage)
        array = storage.held
        if array is None:
            if storage.segment is not None:
                raise DeadTensorError.of(storage.segment)
            return self._adopt_constant(storage)
        if sharding.active():
            array = storage.held = sharding.adopt(array, storage.layout.size)
            if not storage.layout.size:
                self.scalars.add(id(array))
        elif spmd.active():
            array = storage.held = spmd.adopt(array, storage.facts)
        if self.capture:
            array = storage.array
        vid = self.leaf(array)
        if vid in self.holders:
            self.sharers.append(self.holders[vid])
        self.holders[vid] = storage.ref
        storage.views = None
        storage.vid = vid
        storage.segment = self
        return vid

    def _finish_other(self, storage: Storage) -> None:
        """Have the session that a storage's value is pending in run it."""
        other = storage.segment
        if other is not self and other.known is not None and other.known(storage):
            return
        if other is not self and getattr(other, "owner", None) is not None:
            other.owner.finish(other)

    def _adopt_constant(self, storage: Storage) -> int:
        fill = storage.fill
        vid = self.fill(storage.layout, fill)
        self.fills.append(Fill(len(self.nodes) - 1, vid, storage.ref, len(self.leaves), fill, storage.born_full))
        self.overwritten.append((storage.ref, None))
        self.write(storage, vid)
        return vid

    def fill(self, of: Layout, value: Any) -> int:
        """The id of a new value that is one number throughout."""
        if type(value) in (int, float) and repr(value) not in ("0", "1", "0.0", "1.0"):
            return self.emit(full_entry(of.size, of.dtype, type(value)), (), (value,))
        return self.emit(constant_entry(of.size, value, of.dtype), ())

    def leaf(self, array: Any) -> int:
        """The id of an existing array."""
        vid = self.leaf_index.get(id(array))
        if vid is None:
            self.leaves.append(array)
            vid = self.leaf_index[id(array)] = -len(self.leaves)
        return vid

    def read(self, storage: Storage, view: Layout) -> int:
        """The id of a view of a storage."""
        vid = storage.vid if storage.segment is self else self.adopt(storage)
        if self.watch is not None:
            self.watch(storage, storage.layout, vid)
        if view is storage.layout:
            return vid
        views = storage.views
        if views is None:
            views = storage.views = {}
        found = views.get(view)
        if found is None:
            for entry in read_entries(storage.layout, view):
                vid = self.emit(entry, (vid,))
            found = views[view] = vid
        elif self.watch is not None:
            self.watch(storage, view, found)
        return found

    def read_all(self, storages: Sequence[Storage], views: Sequence[Layout]) -> list[int]:
        """`read` for each: a step has hundreds of weights, and mostly they are arrays that it meets for the first time."""
        if self.watch is not None or self.capture or not self._adopt_all(storages):
            return [self.read(storage, view) for storage, view in zip(storages, views, strict=True)]
        vids = list(map(_VID, storages))
        if not same(views, map(_LAYOUT, storages)):
            for k, (storage, view) in enumerate(zip(storages, views, strict=True)):
                if view is not storage.layout:
                    vids[k] = self.read(storage, view)
        return vids

    def _adopt_all(self, storages: Sequence[Storage]) -> bool:
        """`adopt` each that is not in this segment, in order; False, with nothing done, if one is no array of its own that nothing has read."""
        segments = list(map(_SEGMENT, storages))
        if all_are(segments, self):
            return True
        if any_is(segments, self):
            storages = [storage for storage, of in zip(storages, segments, strict=True) if of is not self]
            segments = list(map(_SEGMENT, storages))
        arrays = list(map(_HELD, storages))
        if any_is(arrays, None) or not all_are(segments, None):
            return False
        if sharding.active():
            for k, storage in enumerate(storages):
                arrays[k] = storage.held = sharding.adopt(arrays[k], storage.layout.size)
        elif spmd.active():
            for k, storage in enumerate(storages):
                arrays[k] = storage.held = spmd.adopt(arrays[k], storage.facts)
        start = -len(self.leaves) - 1
        new = dict(zip(map(id, arrays), range(start, start - len(arrays), -1), strict=True))
        if len(new) != len(arrays) or not self.leaf_index.keys().isdisjoint(new):
            return False
        if sharding.active():
            self.scalars.update(id(array) for array, storage in zip(arrays, storages, strict=True) if not storage.layout.size)
        vids = new.values()
        self.leaves += arrays
        self.leaf_index.update(new)
        self.holders.update(zip(vids, map(_REF, storages), strict=True))
        for storage, vid in zip(storages, vids, strict=True):
            storage.views = None
            storage.vid = vid
            storage.segment = self
        return True

    def write_all(self, storages: Sequence[Storage], views: Sequence[Layout], vid: int) -> None:
        """`write_view` for each, with values from `vid` on."""
        adopted = (
            self.watch is None
            and not self.capture
            and same(views, map(_LAYOUT, storages))
            and all_are(map(_SEGMENT, storages), self)
            and not any(facts.links for facts in map(_FACTS, storages) if facts is not None)
            and all(map(self.leaf_index.__contains__, map(id, map(_HELD, storages))))
        )
        if not adopted or max(map(_VID, storages), default=0) >= 0:
            for at, (storage, view) in enumerate(zip(storages, views, strict=True), vid):
                self.write_view(storage, view, at)
            return
        refs = list(map(_REF, storages))
        self.writers += refs
        self.saved += refs
        self.saved_leaves += map(_VID, storages)
        for at, storage in enumerate(storages, vid):
            storage.views = None
            storage.writes += 1
            storage.vid = at
            storage.held = None

    def write(self, storage: Storage, vid: int) -> None:
        """Make a value the storage's whole new content."""
        if self.watch is not None:
            self.watch(storage, None, vid)
        other = storage.segment
        if other is not self or storage.vid < 0:
            if other is not None and other is not self and storage.vid >= 0:
                self._finish_other(storage)
            self.writers.append(storage.ref)
            if storage.held is not None:
                leaf = self.leaf_index.get(id(storage.held))
                if leaf is not None:
                    self.saved.append(storage.ref)
                    self.saved_leaves.append(leaf)
                else:
                    self.overwritten.append((storage.ref, storage.held))
        storage.views = None
        storage.writes += 1
        storage.vid = vid
        storage.segment = self
        storage.held = None if vid >= 0 or self.capture else sharding.alone(self.leaves[-vid - 1])

    def grow(self, storage: Storage, to: Layout, vid: int) -> None:
        """Make a value of another size the storage's whole new content. The one before does not fit any more: after a failure the storage has none."""
        self.write(storage, vid)
        storage.layout = to
        kept = [(ref, leaf) for ref, leaf in self.saved_with_leaves() if ref is not storage.ref]
        self.saved, self.saved_leaves = [ref for ref, _ in kept], [leaf for _, leaf in kept]
        self.overwritten = [(ref, array) for ref, array in self.overwritten if ref() is not storage]
        self.holders = {leaf: ref for leaf, ref in self.holders.items() if ref() is not storage}

    def write_view(self, storage: Storage, view: Layout, vid: int) -> None:
        """Write a value through a view."""
        if view is storage.layout:
            self.write(storage, vid)
            if storage.facts is not None:
                self.follow(storage)
            return
        if not view.numel:
            return
        chain = write_entries(storage.layout, view)
        befores: list[int] = []
        if chain.scatters:
            befores = [self.read(storage, storage.layout)]
            for entry in chain.reads:
                befores.append(self.emit(entry, (befores[-1],)))
        for entry, before in chain.writes:
            vid = self.emit(entry, (vid,) if before is None else (befores[before], vid))
        self.write(storage, vid)
        if storage.facts is not None:
            self.follow(storage)

    def follow(self, storage: Storage, written: Any = None) -> None:
        """After a write: what aliases the storage beyond layouts is written too. `written`: the link that the write came through."""
        assert storage.facts is not None
        for link in list(storage.facts.links):
            if link is not written:
                link.follow(self, storage)

    def renumber(self, new: Renumbering) -> None:
        """Give nodes, leaves and values new ids, here and in the storages that wait for them or were adopted."""
        node_of, leaf_of = new.node_of, new.leaf_of
        self.sources = [s for i, s in enumerate(self.sources) if i in node_of]
        self.numbers = [(node_of[i], values) for i, values in self.numbers if i in node_of]
        self.draws = [(node_of[i], seed, offset) for i, seed, offset in self.draws]
        self.foretold = [(node_of[i], foretell) for i, foretell in self.foretold if i in node_of]
        holding = (ref() for ref in (*self.writers, *self.holders.values(), *self.sharers))
        for storage in {id(s): s for s in holding if s is not None and s.segment is self}.values():
            storage.vid = leaf_of[storage.vid] if storage.vid < 0 else new.value_of[storage.vid]
            storage.views = None
        self.saved_leaves = [leaf_of[leaf] for leaf in self.saved_leaves]
        self.holders = {leaf_of[v]: ref for v, ref in self.holders.items()}
        self.nodes, self.leaves = new.nodes, new.leaves
        self.next_vid = sum(node[0].n_outs for node in new.nodes)
        self.leaf_index = {id(array): -i - 1 for i, array in enumerate(new.leaves)}
        self.predicted = None

    def saved_with_leaves(self) -> Iterator[tuple[weakref.ref[Storage], int]]:
        """Storages and the ids of the leaves that they held before, in the order of their first writes."""
        return zip(self.saved, self.saved_leaves, strict=True)

    def results(self) -> Results:
        """Live storages by the pending id they wait for."""
        waiting: list[Storage] = list(filter(None, map(call, self.writers)))
        if not all_are(map(_SEGMENT, waiting), self):
            waiting = [storage for storage in waiting if storage.segment is self]
        one = dict(zip(map(_VID, waiting), waiting, strict=True))
        if min(one, default=0) >= 0 and len(one) == len(waiting):
            return Results(one)
        return Results.of((storage.vid, storage) for storage in waiting if storage.vid >= 0)
