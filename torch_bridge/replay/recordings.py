"""What is kept of a module's calls: forward and backward passes as tapes, with what went in and came out of them, and whether two of them agree."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

import torch

from torch_bridge.guards.conditions import Conditions
from torch_bridge.identity import same
from torch_bridge.ir.layout import Layout
from torch_bridge.ir.segment import Storage
from torch_bridge.recorder import dispatch
from torch_bridge.recorder.tensor import XLATensor, copy_storage, make
from torch_bridge.replay import output_trees, returned_views
from torch_bridge.replay.side_effects import shares_memory
from torch_bridge.replay.tape import NotNow, NotRepeatable, Own, Recording, Related, Stretch, Tape


class Unknown(Exception):
    """Why nothing can be said of a call. lasting: it will not be otherwise later."""

    def __init__(self, reason: str, lasting: bool = True):
        super().__init__(reason)
        self.lasting = lasting


TIMES = 2
"""Recordings that must agree before one is played."""
CHECK_EVERY = 1024
"""Calls that may be played from one check to the next, in the long run."""
ANSWERS = 4
"""Kinds of calls that differ in nothing but the values that the module asks for."""
MISSES = 8
"""Backward passes of an unknown kind after which nothing more is recorded for the sake of one."""


_STORAGE = attrgetter("_storage")
Source = tuple[str, int]
"""Where a backward pass finds a storage: ("given", its number), ("kept", a value of the forward pass), ("constant", its number there) or ("grad", number of
the module's result)."""


def picker(places: Sequence[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """Picks what is at these places, without Python code for each."""
    if len(places) < 2:  # of one place an itemgetter gives no tuple
        return lambda values: tuple(values[k] for k in places)
    return itemgetter(*places)


class Made(NamedTuple):
    """A tensor that a tape makes. storage: those with one number share memory; value: in the tape; base, view: layouts; spec: how ranks hold it; views: values
    of views of it that the tape has. constant: which of the tape's (negative) it is instead."""

    storage: int
    value: int
    base: Layout
    view: Layout
    spec: Any
    views: tuple[tuple[Layout, int], ...] = ()
    constant: int = 0

    def value_of(self, view: Layout) -> int | None:
        """The value of the whole, or of a view that the tape has."""
        return self.value if view is self.base else dict(self.views).get(view)


@dataclasses.dataclass
class Forward:
    """outs: the tensors that were returned, each once, or what they are views of; rest, how: everything that was, flat, and its nesting; needs: which outs have
    gradients; views: the tensors that were returned, made of outs, where they are not the same. What the backward passes that are known read: kept, values of
    this pass, and reads, numbers of given storages. bumped: places of given tensors whose versions moved, as in-place ops do it (but not batch norm).
    """

    tape: Tape
    outs: list[Made]
    rest: list[Any]
    how: Any
    needs: tuple[bool, ...]
    views: tuple[returned_views.View, ...] | None = None
    kept: list[Made] = dataclasses.field(default_factory=list)
    reads: list[int] = dataclasses.field(default_factory=list)
    bumped: list[int] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        matters = self.tape.influence(made.value for made in self.outs if not made.constant)
        self.overwritten = sorted(matters.intersection(self.tape.written()))
        """Numbers of the given storages on whose contents the results depend, and that the pass overwrites."""
        self.steady = sorted(matters.difference(self.overwritten))
        """Those that it does not overwrite."""
        self.of_steady = picker(self.steady)
        self.read_more(())

    def read_more(self, numbers: Iterable[int]) -> None:
        """Backward passes read these, too."""
        self.reads = sorted({*self.reads, *numbers})
        self.reads_set = frozenset(self.reads)
        self.of_reads = picker(self.reads)

    def difference(self, other: Forward) -> str:
        found = self.tape.difference(other.tape)
        returned = attrgetter("outs", "rest", "how", "needs", "views")
        same = returned(self) == returned(other)
        return found or ("" if same else "it returned something else")


@dataclasses.dataclass
class Backward:
    """reads: where the tape's storages come from; grads: by input: made by the tape, one of its storages, or None. read: by external of the tape, the value of
    the forward pass that it was in the recording, if that was in the same step: there may be several with the same contents.
    """

    tape: Tape
    reads: list[Source]
    grads: list[Made | int | None]
    read: tuple[int | None, ...] = dataclasses.field(default=(), compare=False)
    _values: dict[int, dict[int, int] | None] = dataclasses.field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        self.given = frozenset(k for what, k in self.reads if what == "given")
        """Numbers of the given storages that it reads."""

    def views(self, first: int) -> list[Layout | None] | None:
        """How gradients lie, of inputs from a number on; None if one of them is what was given, as it is."""
        found = self.grads[first:]
        return None if any(isinstance(g, int) for g in found) else [None if g is None else g.view for g in found]  # type: ignore[union-attr]

    def values(self, forward: Forward) -> dict[int, int] | None:
        """For a backward pass in the step of its forward pass: the values of that which the tape's externals are (by their places), so that nobody has to hold
        them. None if they are not that simple: they are views that the forward pass did not read, or written."""
        key = len(forward.kept)
        if key not in self._values:
            self._values[key] = self._find_values({made.value: made for made in forward.kept}, forward.tape.values)
        return self._values[key]

    def _find_values(self, kept: Mapping[int, Made], values: int) -> dict[int, int] | None:
        numbers = {k: kept.get(value) for k, (what, value) in enumerate(self.reads) if what == "kept"}
        changed = {k for k, _ in self.tape.writes} | {g for g in self.grads if isinstance(g, int)}
        found: dict[int, int] = {}
        for place, (k, view) in enumerate(self.tape.externals):
            if k not in numbers:
                continue
            made = numbers[k]
            value = self.read[place]
            if value is None or value >= values:
                value = None if made is None else made.value_of(view)
            if made is None or value is None or k in changed:
                return None
            found[place] = value
        return None if changed.intersection(numbers) else found

    def difference(self, other: Backward) -> str:
        found = self.tape.difference(other.tape)
        same = (self.reads, self.grads) == (other.reads, other.grads)
        return f"in its backward pass, {found or 'it read or made other tensors'}" if found or not same else ""


class Kind:
    """What is known of one kind of call. The backward passes go by which results had gradients and which inputs needed them.

    conditions: what its forward reads, None until a call was looked at; held: the tensors that it may read beside its arguments; lies: how what it was given
    lies in memory. recomputes: its code runs again in the backward pass. functions: classes of `torch.autograd.Function` that it applies, with observers
    of their backward passes. asks_place, asks_strides: what its code asks about memory (`guards.Observer`). unread: a call was looked at in vain because it
    read storages that were full of one number. later: there is a backward pass
    that comes after the step of its forward pass, which then has to keep what it reads. unreached: places in `held` of what needs gradients and no result
    depends on. nested: gradients of its gradients were asked for, in a module that
    nobody has asked to be played: such calls are recorded op by op, as playing them would compute each forward pass twice.
    """

    def __init__(self) -> None:
        self.conditions: Conditions | None = None
        self.held: Any = None
        self.lies: Any = None
        self.recomputes = False
        self.asks_place = False
        self.asks_strides = False
        self.functions: dict[type, list[Any]] = {}
        self.forwards: list[Forward] = []
        self.backwards: dict[Any, list[Backward]] = {}
        self.unread = False
        self.later = False
        self.nested = False
        self.unreached: frozenset[int] | None = None
        self._plays = 0
        self._misses = 0
        self._to_record = 0

    def holding(self) -> Any:
        """The tensors that its forward may read, as they lie now."""
        held = self.held
        if not same(map(_STORAGE, held.tensors), held.storages):
            held = self.held = type(held)(held.tensors)
        return held

    def check_state(self, what: str = "its forward changes ") -> None:
        """Raises NotNow if something that its forward reads is not what it was."""
        if self.conditions is not None and not self.conditions.hold():
            raise NotNow(f"{what}{self.conditions.changed()}")

    def leads_to(self, unreached: frozenset[int]) -> None:
        """Take note of a recording whose results do not depend on these."""
        self.unreached = unreached if self.unreached is None else self.unreached & unreached

    def check_is_due(self) -> bool:
        """Count a call that may be played; whether it is recorded again and compared, as the 4th, 8th, 16th, ... 1024th are, and every 1024th from there."""
        self._plays += 1
        n = self._plays
        return n % CHECK_EVERY == 0 or (4 <= n < CHECK_EVERY and n & (n - 1) == 0)

    def unknown_backward(self) -> str:
        """Why its backward pass may not be played, "" if it may: code of the script's that runs in it is not known, or reads what is not as it was."""
        for cls, observers in self.functions.items():
            if not observers:
                return f"the backward pass of {cls.__name__} has not been seen yet"
            reason = next((o.reason for o in observers if o.reason), "")
            changed = reason or next((o.conditions.changed() for o in observers if not o.conditions.hold()), "")
            if changed:
                return f"the backward pass of {cls.__name__}: {changed}"
        if self.recomputes and self.conditions is not None and not self.conditions.hold():
            return f"an activation checkpoint runs again, and reads {self.conditions.changed()}"
        return ""

    def fits(self, given: Sequence[Storage]) -> bool:
        """Whether the module would get the same answers when it asks for values of what it is given."""
        return not self.forwards or self.forwards[0].tape.fits(given)

    def miss(self) -> None:
        """A backward pass was not known: record the next calls, which may have the same."""
        self._misses += 1
        self._to_record = TIMES if self._misses <= MISSES else 0

    def forward(self, differentiable: bool) -> Forward | None:
        """The forward pass to play, if there is one (and a backward pass that fits, where one may be asked for)."""
        if self._to_record and differentiable:
            self._to_record -= 1
            return None
        if len(self.forwards) < TIMES or (differentiable and self.functions and self.unknown_backward()):
            return None
        if differentiable and any(self.forwards[0].needs) and not any(len(found) >= TIMES for found in self.backwards.values()):
            return None
        return self.forwards[0]

    def backward(self, pattern: Any) -> Backward | None:
        """The backward pass to play."""
        found = self.backwards.get(pattern, [])
        return found[0] if len(found) >= TIMES else None


def described(x: object) -> Any:
    """An argument that is no tensor, for comparison."""
    kind = type(x)
    if kind is float:
        return kind, repr(x)
    if x is None or kind in (bool, int, str, torch.dtype, torch.device):
        return kind, x
    raise Unknown(f"an argument of type {kind.__name__}", lasting=False)


def pattern(grads: Sequence[Any], needed: Sequence[bool], known: Callable[[Storage], Source | None], later: bool) -> Any:
    """By which backward passes differ. known: what a storage is, if it was there before; gradients may share memory with it, and with each other. later: the
    step has ended since the forward pass, so that views are read anew."""
    seen: dict[int, Source] = {}
    described = [
        None if g is None else (g._layout, g._storage.layout, known(g._storage) or seen.setdefault(id(g._storage), ("grad", k)))
        for k, g in enumerate(grads)
    ]
    return tuple(described), tuple(needed), later


class ReplayDiffersError(RuntimeError):
    """A call that might have been played was recorded once more, and did something else."""


def agree(stop: Callable[[str], None], known: list[Any], new: Any) -> bool:
    """Add a recording to those that are known, or stop if it differs from them. Raises ReplayDiffersError if calls may have been played by then."""
    found = known[0].difference(new) if known else ""
    if found:
        stop(f"two recordings differ: {found}")
        if len(known) >= TIMES:
            raise ReplayDiffersError(
                f"a module under torch_bridge.optimize does not do what was played for it: {found}. Steps since the last check may be wrong: go back to a "
                "checkpoint, set NXD_JAX_REPLAY=0 (or call torch_bridge.restore(module)), and please report the module: what it reads has not been seen"
            )
        return False
    if len(known) < TIMES:
        known.append(new)
    return True


# -- from what was watched ----------------------------------------------------------------------------


def forward_of(recording: Recording, returned: returned_views.Arranged, rest: list[Any], how: Any, needs: tuple[bool, ...]) -> Forward:
    """A recorded forward pass. Raises NotRepeatable."""
    outs, views = returned
    recording.check()
    made = _by_id(recording)
    unknown = output_trees.unknown(rest)
    if unknown is not None:
        raise NotRepeatable(
            f"it returns an object of class {unknown.__name__}; return tensors in tuples, dicts or dataclasses that torch's pytree knows"
        )
    if any(not isinstance(t, XLATensor) for t in outs):
        raise NotRepeatable("it returns a tensor that is not on xla, and requires gradients or is no plain tensor")
    if any(id(t._storage) not in made and recording.constant(t._storage) is None for t in outs):
        raise NotRepeatable("it returns a view of a tensor that it was given, or one with the same memory")
    tape = recording.tape()
    order: dict[int, int] = {}
    found = [_made(t, made, recording, order) for t in outs]
    for number in {m.storage for m in found} if any(needs) else ():
        if shares_memory(m.view for m in found if m.storage == number):
            raise NotRepeatable("two of the tensors that it returns are views of the same elements, and autograd does not know it")
    return Forward(tape, found, rest, how, needs, views)


def sources_of(
    given: Sequence[Storage], made: Sequence[Own], constants: Sequence[tuple[Storage, Any]], grads: Sequence[Any]
) -> tuple[list[tuple[Storage, Source]], Related]:
    """The storages that a backward pass may use, each once; and which of those that the forward pass made are twins or copies (`Recording`)."""
    found: dict[int, tuple[Storage, Source]] = {}
    for k, g in enumerate(grads):
        if g is not None:
            found.setdefault(id(g._storage), (g._storage, ("grad", k)))
    for k, storage in enumerate(given):
        found.setdefault(id(storage), (storage, ("given", k)))
    first: dict[int, Storage] = {}
    twins: list[tuple[Storage, Storage]] = []
    copies: list[tuple[Storage, Storage]] = []
    for own in made:
        if id(own.storage) not in found:
            if own.value in first:
                twins.append((own.storage, first[own.value]))
            else:
                first[own.value] = own.storage
                if own.copied is not None:
                    copies.append((own.storage, own.copied))
                found[id(own.storage)] = own.storage, ("kept", own.value)
    for k, (storage, _) in enumerate(constants, 1):
        if not storage.pending:
            found.setdefault(id(storage), (storage, ("constant", -k)))
    return list(found.values()), Related(twins, copies)


def backward_of(recording: Recording, sources: Sequence[Source], found: Sequence[Any]) -> Backward:
    """A recorded backward pass that gave these gradients. Raises NotRepeatable."""
    recording.check()
    made = _by_id(recording)
    places = {id(s): k for k, s in enumerate(recording.storages)}
    grads: list[Made | int | None] = []
    order: dict[int, int] = {}
    for g in found:
        if g is None:
            grads.append(None)
        elif id(g._storage) in made:
            grads.append(_made(g, made, recording, order))
        elif id(g._storage) in places and g._layout is g._storage.layout:
            grads.append(places[id(g._storage)])
        elif recording.constant(g._storage) is not None and g._layout is g._storage.layout:
            grads.append(recording.constant(g._storage))
        else:
            raise NotRepeatable("a gradient is a view of a tensor that it was given")
    tape = recording.tape()
    if tape.asked:
        raise NotRepeatable("it reads a tensor's value (.item(), print, a branch on it)")
    used = sorted({*tape.storages(), *(g for g in grads if isinstance(g, int) and g >= 0)})
    number = {k: place for place, k in enumerate(used)}
    return Backward(
        tape.renumbered(number),
        [sources[k] for k in used],
        [number.get(g, g) if isinstance(g, int) else g for g in grads],
        recording.values_before(),
    )


def learn_backward(stop: Callable[[str], None], kind: Kind, new: Backward, made: Sequence[Own], which: Any) -> None:
    """Add a backward pass to what is known, and what it reads of the forward pass to what that keeps."""
    if not agree(stop, kind.backwards.setdefault(which, []), new) or not kind.forwards:
        return
    forward = kind.forwards[0]
    forward.read_more(k for what, k in new.reads if what == "given")
    for what, value in new.reads:
        if what == "kept" and value not in {m.value for m in forward.kept}:
            owns = [own for own in made if own.value == value]
            storage = owns[0].storage
            views = {view: at for own in owns if own.storage.layout is storage.layout for view, at in own.views}
            forward.kept.append(Made(0, value, storage.layout, storage.layout, storage.spec, tuple(views.items())))
    kind.later = any(which[2] or any(b.values(forward) is None for b in found) for which, found in kind.backwards.items())


def _by_id(recording: Recording) -> dict[int, tuple[Storage, int]]:
    return {id(own.storage): (own.storage, own.value) for own in recording.made()}


def _made(t: XLATensor, made: dict[int, tuple[Storage, int]], recording: Recording, order: dict[int, int]) -> Made:
    """order: numbers of storages so far."""
    constant = recording.constant(t._storage)
    storage, value = made[id(t._storage)] if constant is None else (t._storage, 0)
    number = order.setdefault(id(storage), len(order))
    facts = storage.facts
    if facts is not None and (facts.links or facts.owner is not None or facts.keep is not None):
        raise NotRepeatable("a result shares its memory with another tensor in a way that only its own op knows")
    return Made(number, value, storage.layout, t._layout, storage.spec, constant=constant or 0)


# -- and back ---------------------------------------------------------------------------------------


def tensor_of(made: Made, at: Stretch, shared: dict[int, Storage], constants: Sequence[Storage]) -> XLATensor:
    """The tensor anew, where its tape was played. shared: storages by number, of tensors that share memory."""
    storage = shared.get(made.storage)
    if storage is None:
        storage = shared[made.storage] = constants[made.constant] if made.constant else storage_of(made, at)
    return make(made.view, storage)


def storage_of(made: Made, at: Stretch) -> Storage:
    """Its storage anew."""
    storage = Storage(made.base)
    if made.spec is not None:
        storage.describe(spec=made.spec)
    dispatch.STATE.session.current.write(storage, at.id(made.value))
    if made.views:
        storage.views = {view: at.id(value) for view, value in made.views}
    return storage


def gradients_of(grads: Sequence[Made | int | None], at: Stretch, storages: Sequence[Storage]) -> list[Any]:
    """Gradients anew, each with memory of its own. storages: those that the stretch was played on."""
    found: list[Any] = []
    for g in grads:
        if g is None:
            found.append(None)
        elif isinstance(g, int):
            storage = copy_storage(storages[g])
            found.append(make(storage.layout, storage))
        else:
            found.append(make(g.view, storage_of(g, at)))
    return found
