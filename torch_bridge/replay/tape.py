"""A stretch of recorded nodes that can be played again: on other arrays, at another place, without asking Python for each op.

`Recording` watches a segment while a function records into it and makes a `Tape` of what it added; `Tape.play` adds the same nodes once more. Values are
named relative to the stretch: 0, 1, ... are its own, -1, -2, ... are `externals`, each a view of one of the storages that the caller numbers, or of a constant
(`host_constants`), numbered -1, -2, ... What is played is what would have been recorded, node for node, so programs, numbers and pictures are the same.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from torch_bridge.config.settings import SETTINGS
from torch_bridge.ir import number_families
from torch_bridge.ir.layout import Layout
from torch_bridge.ir.segment import LOCK, Segment, Storage
from torch_bridge.mesh import random_state, sharding, spmd
from torch_bridge.passes.verify import tapes
from torch_bridge.recorder import dispatch, host_values
from torch_bridge.replay.host_constants import Constant, Uploads
from torch_bridge.source import Source

if TYPE_CHECKING:
    import torch

Node = tuple[Any, ...]


class NotRepeatable(Exception):
    """Why a stretch cannot be played again. lasting: it will not be otherwise in a later recording."""

    lasting = True


class NotNow(NotRepeatable):
    """The same, for this time."""

    lasting = False


class Stretch(NamedTuple):
    """Where a tape was played. base: the id of its value 0; externals: their ids."""

    base: int
    externals: tuple[int, ...]

    def id(self, value: int) -> int:
        """Of one of the tape's values, or externals, by its name in the tape."""
        return self.base + value if value >= 0 else self.externals[-value - 1]


class _Asks(NamedTuple):
    """What the answers of a tape depend on: externals and views of storages, and (entry, inputs, numbers, first result) of ops."""

    views: list[Any]
    steps: list[tuple[Any, list[int], tuple[Any, ...], int]]


@dataclasses.dataclass(frozen=True)
class Tape:
    """nodes: entries with relative value ids. externals: (number of a storage, view). numbers: (node, lifted numbers). draws: (node that draws random numbers,
    which draw of the forward pass it repeats, as activation checkpoints do, or None). values: how many the stretch makes. writes: (number of a storage, value)
    at its end; a negative value is an external, copied. views: (number of a storage, view, value) that were read of storages. constants: what it takes from
    the host. asked: (value or (number of a storage, view), answer) of what its code asked for, and what can be worked out on the host (`host_values`): it may
    only be played where the answers are the same. changes: its code changed something that it had made.
    """

    nodes: tuple[Node, ...]
    externals: tuple[tuple[int, Layout], ...]
    numbers: tuple[tuple[int, tuple[Any, ...]], ...]
    draws: tuple[tuple[int, int | None], ...]
    values: int
    writes: tuple[tuple[int, int], ...]
    views: tuple[tuple[int, Layout, int], ...]
    constants: tuple[Constant, ...] = ()
    asked: tuple[tuple[Any, Any], ...] = ()
    sources: tuple[Source, ...] = dataclasses.field(compare=False, default=())
    changes: bool = dataclasses.field(compare=False, default=False)
    _placed: dict[Any, list[Node]] = dataclasses.field(compare=False, default_factory=dict)

    def placed(self) -> list[Storage]:
        """Storages of its own with the constants, to be given to `play` behind the others: there, -1 is the first of them."""
        return [c.storage() for c in reversed(self.constants)]

    def play(self, storages: Sequence[Any], known: Mapping[int, int] | None = None, drawn: tuple[int, int] = (0, 0)) -> Stretch:
        """Record the stretch on these storages. known: ids of externals, by their places, for which there is no storage. drawn: seed and offset of the first
        draw of the forward pass, for the tape of its backward pass."""
        with LOCK:
            segment = dispatch.STATE.session.current
            known = known or {}
            segment.kept += [c.array for c in self.constants]
            reads = [x for i, x in enumerate(self.externals) if i not in known] if known else self.externals
            found = segment.read_all([storages[k] for k, _ in reads], [view for _, view in reads])
            if known:
                others = iter(found)
                found = [known[i] if i in known else next(others) for i in range(len(self.externals))]
            ids = tuple(found)
            base = segment.next_vid
            nodes = self._placed.get((base, ids))
            if nodes is None:
                if len(self._placed) >= _PLACES:
                    self._placed.clear()
                nodes = [(n[0], *[base + r if r >= 0 else ids[-r - 1] for r in n[1:]]) for n in self.nodes]
                if SETTINGS.verify:
                    tapes.check(segment, self._said(storages), nodes, base, ids)
                self._placed[base, ids] = nodes
            draws = [(node, *(random_state.DEFAULT.take()[:2] if k is None else (drawn[0], drawn[1] + k))) for node, k in self.draws]
            segment.splice(nodes, self.values, self.numbers, draws, self.sources)
            for k, value in self.writes:
                segment.write(storages[k], base + value if value >= 0 else ids[-value - 1])
            for k, view, value in self.views:
                storage = storages[k]
                if storage is not None:
                    if storage.views is None:
                        storage.views = {}
                    storage.views.setdefault(view, base + value)
            return Stretch(base, ids)

    def _said(self, storages: Sequence[Any]) -> tapes.Played:
        """What it says, for the verifier."""
        views = [view for _, view in self.externals]
        left = [(storages[k].layout, value) for k, value in self.writes] + [(view, value) for k, view, value in self.views]
        return tapes.Played(self.nodes, self.values, views, self.numbers, [k for k, _ in self.draws], left, self.sources)

    def fits(self, storages: Sequence[Any]) -> bool:
        """Whether its code would get the same answers on these storages, as far as that can be told without the device."""
        if not self.asked:
            return True
        storages = [*storages, *self.placed()]
        with LOCK:
            work = host_values.Work(dispatch.STATE.session.current)
            at: dict[Any, int] = {}
            for v in self._asks.views:
                k, view = self.externals[-v - 1] if type(v) is int else v
                found = work.view(storages[k], view)
                if found is None:
                    return False
                at[v] = found
            for entry, inputs, numbers, first in self._asks.steps:
                new = work.add(entry, [at[v] for v in inputs], numbers)
                at.update((first + k, new + k) for k in range(entry.n_outs))
            answers = work.results([at[v] for v, _ in self.asked])
            return answers is not None and [a.item() for a in answers] == [answer for _, answer in self.asked]

    @functools.cached_property
    def _asks(self) -> _Asks:
        needed = {v for v, _ in self.asked}
        numbers, steps, at = dict(self.numbers), [], self.values
        for k in range(len(self.nodes) - 1, -1, -1):
            entry, *inputs = self.nodes[k]
            at -= entry.n_outs
            if not needed.isdisjoint(range(at, at + entry.n_outs)):
                needed.update(inputs)
                steps.append((entry, inputs, numbers.get(k, ()), at))
        return _Asks([v for v in needed if type(v) is not int or v < 0], steps[::-1])

    def storages(self) -> set[int]:
        """Numbers of the storages that it reads or writes, without those of constants."""
        return {k for k in ({k for k, _ in self.externals} | {k for k, _ in self.writes} | {k for k, *_ in self.views}) if k >= 0}

    def written(self) -> list[int]:
        """Numbers of the storages that it writes."""
        return [k for k, _ in self.writes]

    def influence(self, values: Iterable[int]) -> set[int]:
        """Numbers of the storages whose contents before the stretch can change these values."""
        known: list[frozenset[int]] = []
        before = [frozenset({k} if k >= 0 else ()) for k, _ in self.externals]
        for entry, *refs in self.nodes:
            found = frozenset().union(*(known[r] if r >= 0 else before[-r - 1] for r in refs))
            known += [found] * entry.n_outs
        return set().union(*(known[v] if v >= 0 else before[-v - 1] for v in values))

    def renumbered(self, order: Mapping[int, int]) -> Tape:
        """The same with other numbers for its storages; constants keep theirs."""
        return dataclasses.replace(
            self,
            externals=tuple((order.get(k, k), view) for k, view in self.externals),
            writes=tuple((order[k], value) for k, value in self.writes),
            views=tuple((order.get(k, k), view, value) for k, view, value in self.views),
            asked=tuple((v if type(v) is int else (order.get(v[0], v[0]), v[1]), answer) for v, answer in self.asked),
            _placed={},
        )

    def difference(self, other: Tape) -> str:
        """The first thing in which two recordings differ, with its line in the script; "" if they are the same.

        A number that was a constant when one of them was made may have become an input since (`number_families`).
        """
        nodes, numbers = self._now()
        new, found = other._now()
        for k, (a, b) in enumerate(zip(nodes, new, strict=False)):
            if a != b:
                return f"op {k} was {a[0].op}, then {b[0].op if a[0] is not b[0] else 'the same on other tensors'} ({other.sources[k]})"
        if len(self.nodes) != len(other.nodes):
            longer = max(self, other, key=lambda t: len(t.nodes))
            return f"it recorded {len(self.nodes)} ops, then {len(other.nodes)} ({longer.sources[min(len(self.nodes), len(other.nodes))]})"
        for (k, a), (_, b) in zip(numbers, found, strict=False):
            if repr(a) != repr(b):
                return f"a Python number was {a}, then {b} ({other.sources[k]})"
        if self.constants != other.constants:
            return "it takes other values from the host"
        if repr(self.asked) != repr(other.asked):
            return f"it asked for values and got {[a for _, a in self.asked]}, then {[a for _, a in other.asked]}"
        for field in ("externals", "draws", "values", "writes", "views"):
            if getattr(self, field) != getattr(other, field):
                return f"it reads or writes other tensors ({field})"
        return "" if repr(numbers) == repr(found) else "it uses other Python numbers"

    def _now(self) -> tuple[list[Node], list[tuple[int, tuple[Any, ...]]]]:
        """Nodes and numbers as they would be recorded now."""
        nodes, numbers = number_families.as_recorded_now(self.nodes)
        return nodes, sorted([*self.numbers, *numbers.items()], key=lambda of: of[0])


_FOREIGN = "that is neither an argument nor a parameter, buffer or attribute of the module"
_ASKS = "it reads a tensor's value (.item(), print, a branch on it) or ends the step inside"
_THREAD = "another thread recorded ops at the same time"
_HOST = "it copies values from the host into a tensor that it was given"
_PLACES = 8
"""Places in a step at which a tape's nodes are kept ready."""


class Own(NamedTuple):
    """A storage that a stretch made, with its value in the tape (negative: it is a copy of an external), and the values of views of it that were read.
    copied: the storage that it is a copy of."""

    storage: Storage
    value: int
    views: tuple[tuple[Layout, int], ...]
    copied: Storage | None


class Related(NamedTuple):
    """Storages beside those that a stretch is told of. twins: others with the same contents as one of them, with that one. copies: those of them that were
    copies of others when they were made, with these."""

    twins: Sequence[tuple[Storage, Storage]] = ()
    copies: Sequence[tuple[Storage, Storage]] = ()


_NONE = Related()


class Unread(NotNow):
    """A storage that is full of one number was read for the first time."""


_RECORDING: list[Recording] = []
"""Those that have not stopped, of all threads and their sessions."""


def _adopt(storage: Storage) -> None:
    """Have its value lie on the mesh, if there is one."""
    if sharding.active():
        storage.held = sharding.adopt(storage.held, storage.layout.size)
    elif spmd.active():
        storage.held = spmd.adopt(storage.held, storage.facts)


def _tell(storage: Storage, new: bool) -> None:
    for recording in tuple(_RECORDING):
        recording._filled(storage, new)


class Recording:
    """Watches what is recorded from now on. storages: what the stretch may read and write beyond its own; their numbers are their places.

    ahead: record now what fills the storages that are full of one number, before the stretch. Else a stretch that reads one is `Unread`, and its nodes
    are in the order in which they would be without a recording. after: the recording of the forward pass, if this is the backward pass in the
    same step: it may use the views that the forward pass has read. All other views are read again, so that they are part of the stretch.
    """

    def __init__(
        self,
        storages: Sequence[Storage],
        ahead: bool = True,
        after: Recording | None = None,
        related: Related = _NONE,
        drawn: tuple[int, int, int] = (0, 0, 0),
    ):
        self._drawn = drawn
        self._after = after
        self.storages = list(storages)
        self._twins = [twin for twin, _ in related.twins]
        self._twin_of = {id(twin): storage for twin, storage in related.twins}
        self._copy_of = {id(copy): storage for copy, storage in related.copies}
        self._number = {id(s): k for k, s in enumerate(self.storages)}
        segment = self._segment = dispatch.STATE.session.current
        for storage in self.storages:
            if storage.constant and ahead:
                segment.read(storage, storage.layout)
            elif storage.segment is not segment and storage.held is not None:
                _adopt(storage)
        self._node, self._vid, self._writer = len(segment.nodes), segment.next_vid, len(segment.writers)
        self._before = [s.vid if s.segment is segment else None for s in self.storages]
        self._arrays = [s.held for s in self.storages]
        self._constant = [s.fill if s.constant else None for s in self.storages]
        self._views = [(s, s.vid if s.segment is segment else None, s.views) for s in (*self.storages, *self._twins)]
        for storage, _, _ in self._views:
            alike = self._twin_of.get(id(storage), storage).layout is storage.layout
            storage.views = after.views_of(storage) if after is not None and alike else None
        self._seen: dict[int, tuple[Storage, Layout]] = {}
        self._born: dict[int, weakref.ref[Storage]] = {}
        self._written: set[int] = set()
        self._changed = False
        self._problem: NotRepeatable | None = None
        self._stopped = False
        self._reads: list[tuple[int, Layout, int]] = []
        self._seed = (random_state.DEFAULT.seed, random_state.DEFAULT.offset, random_state.DEFAULT.axes)
        self._thread = threading.get_ident()
        if segment.recording is not None and segment.recording._thread != self._thread:
            segment.recording._found(NotNow(_THREAD))
            self._found(NotNow(_THREAD))
        self._around, segment.recording = segment.recording, self
        segment.watch, Storage.witness = self._saw, _tell
        _RECORDING.append(self)
        if self._around is not None:
            self._around._found(NotRepeatable("it runs the backward pass of another module inside"))
        self._asked: list[tuple[Any, Any]] = []
        self._uploads = Uploads(segment)
        self.constants: list[tuple[Storage, Constant]] = []
        """What was uploaded and read, or asked for (`constant`), in that order, with the storages that have it."""
        self._constants: dict[int, int] = {}

    def include(self, storage: Storage) -> None:
        """Something else that the stretch may read and write, which it has not used so far."""
        if storage.constant:
            self._found(NotNow("it reads a tensor, beside those that the module holds, that is full of one number"))
        elif storage.segment is not self._segment and storage.held is not None:
            _adopt(storage)
        vid = storage.vid if storage.segment is self._segment else None
        if vid is not None and vid >= self._vid:
            self._found(NotNow("it reads a tensor that it has written before under another name"))
        self._number[id(storage)] = len(self.storages)
        self.storages.append(storage)
        self._before.append(vid)
        self._arrays.append(storage.held)
        self._constant.append(storage.fill if storage.constant else None)
        self._views.append((storage, vid, storage.views))
        storage.views = None

    def _found(self, problem: NotRepeatable) -> None:
        self._problem = self._problem or problem

    def _saw(self, storage: Storage | None, view: Layout | None, vid: int) -> None:
        if self._around is not None:
            self._around._saw(storage, view, vid)
        if self._stopped:
            return
        if threading.get_ident() != self._thread:
            self._found(NotNow(_THREAD))
            return
        if storage is None:
            self._found(NotRepeatable(_ASKS))
            return
        number = self._number.get(id(storage))
        if id(storage) in self._twin_of:
            self._saw_twin(storage, view, vid)
        elif view is None:
            if number is not None:
                if storage.constant and self._constant[number] is not None:
                    self._found(Unread("it reads tensors that are full of one number"))
                self._written.add(number)
            elif self.is_own(storage):
                self._changed |= not storage.constant
            else:
                self._found(NotRepeatable(f"it writes to a tensor of shape {list(storage.layout.size)} {_FOREIGN}"))
        elif vid < self._vid and number not in self._written:
            self._saw_external(storage, number, view, vid)

    def _saw_external(self, storage: Storage, number: int | None, view: Layout, vid: int) -> None:
        if number is None:
            if not self.is_own(storage):
                self._found(NotRepeatable(f"it uses a tensor of shape {list(storage.layout.size)} {_FOREIGN}"))
            elif vid not in self._seen and vid < 0 and self.constant(storage) is not None:
                self._seen[vid] = storage, view
            return
        if storage.held is not self._arrays[number]:
            self._found(NotNow(_HOST))
        first = self._seen.setdefault(vid, (storage, view))[0]
        if self._copy_of.get(id(first)) is storage:  # the other must not change until here, so it says more
            self._seen[vid] = storage, view
        elif first is not storage and self._copy_of.get(id(storage)) is not first:
            self._found(NotNow("two of its tensors share one array for now"))

    def _saw_twin(self, storage: Storage, view: Layout | None, vid: int) -> None:
        first = self._twin_of[id(storage)]
        if view is None:
            self._found(NotRepeatable("it writes to a copy of another tensor"))
        elif vid < self._vid:
            whole, k = view is storage.layout, self._number[id(first)]
            if whole and vid != self._before[k] and (self._before[k] is not None or storage.held is not self._arrays[k]):
                self._found(NotNow("two tensors with the same contents have others now"))
            self._seen.setdefault(vid, (first, first.layout if whole else view))

    def _filled(self, storage: Storage, new: bool) -> None:
        if threading.get_ident() != self._thread:
            return  # a data loader's; if it records ops, `_saw` is told
        if new:
            self._born[id(storage)] = weakref.ref(storage)
        elif self.is_own(storage):
            self._changed |= not storage.constant
        elif id(storage) in self._twin_of or id(storage) not in self._number:
            self._found(NotRepeatable(f"it fills a tensor of shape {list(storage.layout.size)} {_FOREIGN}"))

    def has_still(self, storage: Storage) -> bool:
        """Whether a given storage holds what it held when this began."""
        number = self._number.get(id(storage))
        return number is not None and number not in self._written

    def got_view(self, storage: Storage, view: Layout, value: torch.Tensor) -> None:
        """Code was told, without the device, what a storage holds that has not changed since this began, or that is no result of ops."""
        number = self._number.get(id(storage))
        if number is not None:
            self._asked.append(((number, view), value.item()))
        elif not self.is_own(storage):
            self._found(NotRepeatable(f"it asks for a value of a tensor {_FOREIGN}"))

    def got_value(self, vid: int, value: torch.Tensor, place: int) -> None:
        """Code was told, without the device, a value that follows from nodes from this place on, or from leaves (0)."""
        if place <= self._node:  # one that follows from nodes of the stretch alone is the same whenever they are
            self._asked.append((vid, value.item()))

    def constant(self, storage: Storage) -> int | None:
        """The number of a constant, if that is what a storage of the stretch's own holds."""
        number = self._constants.get(id(storage))
        found = self._uploads.constant(storage) if self.is_own(storage) else None
        if number is None and found is not None:
            self.constants.append((storage, found))
            number = self._constants[id(storage)] = -len(self.constants)
        return None if found is None else number

    def stop(self) -> None:
        """End watching."""
        self._stopped = True
        _RECORDING.remove(self)
        Storage.witness = _tell if _RECORDING else None
        self._leave()
        self._uploads.stop()
        numbered = {**dict(enumerate(self.storages)), **{-k: s for k, (s, _) in enumerate(self.constants, 1) if not s.pending}}
        self._reads = [(k, view, vid) for k, s in numbered.items() for view, vid in (s.views or {}).items() if vid >= self._vid]
        self._place = {vid: -k - 1 for k, vid in enumerate(self._seen)}
        self._last = {id(own.storage): (own.storage.vid, {view: value + self._vid for view, value in own.views}) for own in self.made()}
        for k, view, vid in self._reads:
            if k not in self._written:
                storage = numbered[k]
                self._last.setdefault(id(storage), (storage.vid, {}))[1][view] = vid
        for storage, before, known in self._views:
            if known and storage.segment is self._segment and storage.vid == before:
                storage.views = {**(storage.views or {}), **known}

    def _leave(self) -> None:
        """Those around watch alone again. Those of other threads may stop in any order: one that stopped passes on what it sees until those inside stop."""
        segment, around = self._segment, self._segment.recording
        if around is not self:
            return
        while around is not None and around._stopped:
            around = around._around
        segment.recording = around
        segment.watch = None if around is None else around._saw

    def views_of(self, storage: Storage) -> dict[Layout, int] | None:
        """Views of a storage that the stretch read, if its value is still the same."""
        vid, views = self._last.get(id(storage), (None, None))
        return dict(views) if views and storage.segment is self._segment and storage.vid == vid else None

    def made(self) -> list[Own]:
        """Storages that the stretch made and that are still there. After `stop`."""
        found: dict[int, Own] = {}
        for ref in self._segment.writers[self._writer :]:
            storage = ref()
            if storage is None or id(storage) in self._number or storage.segment is not self._segment:
                continue
            if storage.vid >= self._vid or (storage.vid in self._place and self.is_own(storage)):
                views = tuple((view, vid - self._vid) for view, vid in (storage.views or {}).items() if vid >= self._vid)
                copied, view = self._seen.get(storage.vid, (storage, None))
                of = copied if view is copied.layout else None
                found[id(storage)] = Own(storage, self._relative(storage.vid, self._place), views, of)
        return list(found.values())

    def check(self) -> None:
        """Raises NotRepeatable if that was seen so far."""
        if dispatch.STATE.session.current is not self._segment:
            raise NotRepeatable(_ASKS)
        if self._problem is not None:
            raise self._problem

    def tape(self) -> Tape:
        """What was recorded. Raises NotRepeatable."""
        self.check()
        segment = self._segment
        number = {**self._number, **self._constants}
        names = self._place  # in the order of reading: leaves get the numbers that they get without a recording
        sources = segment.predicted.sources if segment.predicted is not None else segment.sources
        nodes = [
            (n[0], *[self._relative(vid, names, sources[k] if k < len(sources) else None) for vid in n[1:]])
            for k, n in enumerate(segment.nodes[self._node :], self._node)
        ]
        writes = self._writes(names)
        written = {k for k, _ in writes}
        views = [(k, view, vid - self._vid) for k, view, vid in self._reads if k not in written]
        return Tape(
            tuple(nodes),
            tuple((number[id(storage)], view) for storage, view in self._seen.values()),
            tuple((i - self._node, values) for i, values in segment.numbers if i >= self._node),
            self._draws(segment),
            segment.next_vid - self._vid,
            tuple(writes),
            tuple(views),
            tuple(constant for _, constant in self.constants),
            tuple((self._relative(what, names) if type(what) is int else what, answer) for what, answer in self._asked),
            tuple(sources[self._node : len(segment.nodes)]),
            self._changed,
        )

    def _relative(self, vid: int, names: dict[int, int], source: Source | None = None) -> int:
        """A value's name in the tape, given those of externals. source: of the op that uses it."""
        if vid >= self._vid:
            return vid - self._vid
        if vid not in names:
            shape = f" of shape {list(self._segment.leaves[-vid - 1].shape)}" if vid < 0 else ""
            where = f" ({source.where})" if source is not None else ""
            raise NotRepeatable(f"it uses a tensor{shape} {_FOREIGN}{where}; if its forward makes it on the host, make it a buffer")
        return names[vid]

    def values_before(self) -> tuple[int | None, ...]:
        """By external: which value of the stretch before (`after`) it is; None if it is none, or there is no such stretch."""
        first = self._vid if self._after is None else self._after._vid
        return tuple(vid - first if first <= vid < self._vid else None for vid in self._seen)

    def is_own(self, storage: Storage) -> bool:
        """Whether the stretch made it."""
        ref = self._born.get(id(storage))
        return ref is not None and ref() is storage

    def _writes(self, names: dict[int, int]) -> list[tuple[int, int]]:
        """What the storages hold at the end, where it is something else."""
        writes = []
        for k, (s, before) in enumerate(zip(self.storages, self._before, strict=True)):
            if s.constant and self._constant[k] is not s.fill:
                raise NotNow("it fills a tensor that it was given with one number, in place")
            if k in self._written:
                if s.segment is not self._segment:
                    raise NotNow(_HOST)
                if s.vid != before:
                    writes.append((k, self._relative(s.vid, names)))
            elif s.held is not self._arrays[k]:
                raise NotNow(_HOST)
        return writes

    def _draws(self, segment: Segment) -> tuple[tuple[int, int | None], ...]:
        seed, offset, axes = self._seed
        first, start, count = self._drawn
        draws: list[tuple[int, int | None]] = []
        for i, *draw in segment.draws:
            if i < self._node:
                continue
            again = draw[1] - start if draw[0] == first and start <= draw[1] < start + count else None
            if (draw == [seed, offset]) == (again is not None):  # neither, or one cannot tell
                raise NotRepeatable("it draws random numbers from a generator or a random state of its own")
            offset += again is None
            draws.append((i - self._node, again))
        if (random_state.DEFAULT.seed, random_state.DEFAULT.offset, random_state.DEFAULT.axes) != (seed, offset, axes):
            raise NotRepeatable("it sets the random state")
        return tuple(draws)
