"""What one run of a forward reads, writes and calls, as far as Python's state is concerned: told by the probes of instrumented code.

An `Observer` collects `Conditions`. Objects made during the run are its own: what is read from them follows from the rest. What cannot be followed (a call into
code that is not known, a change of something that was there before) is a `reason`: the run goes on as it would without anybody looking, and its result
is right, but nothing may be concluded from it.
"""

from __future__ import annotations

import collections
import contextlib
import gc
import sys
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from torch_bridge import source
from torch_bridge.guards.conditions import HEAP, MISSING, Conditions
from torch_bridge.guards.instrument import ROUTED
from torch_bridge.guards.libraries import is_library
from torch_bridge.guards.values import BYTES, is_a, unchanging
from torch_bridge.recorder.tensor import XLATensor
from torch_bridge.runtime.transfer import bits

Function = Callable[..., Any]
Args = tuple[Any, ...]
Kwargs = dict[str, Any]
Rule = tuple[Callable[..., Any], Sequence[Any]]
"""What follows calls, as rule(observer, function, args, kwargs); and the functions whose calls."""
RuleOfType = tuple[Any, Callable[..., Any]]
"""Types whose objects are called, and the rule for that."""

_CONTAINERS = (list, dict, set, collections.deque, collections.OrderedDict, collections.defaultdict, bytearray)


class Active(threading.local):
    """observer: of the run that this thread is in."""

    observer: Observer | None = None


ACTIVE = Active()


class Observer:
    """One run.

    caller: makes calls for the probes (`calls`). given: the arguments. reads: told of each tensor on xla that is read from somewhere; False: the run has made
    it. root: the object whose method runs; it is not kept alive. reason: why nothing may be concluded, "" if everything could be followed; lasting: it will
    be so in later runs, too.
    functions: classes of `torch.autograd.Function` that were applied, with observers of their backward passes, as these run. recomputes: code runs
    again in the backward pass (activation checkpoints). asks_place, asks_strides: it asks where in memory a tensor starts (or makes a view that goes by that),
    or for its strides.
    """

    def __init__(
        self, caller: Callable[..., Any], given: object = (), reads: Callable[[Any], bool] | None = None, root: object = None
    ) -> None:
        self.caller = caller
        self.reads = reads or _ignore
        self.conditions = Conditions(root)
        self.functions: dict[type, list[Observer]] = {}
        self.reason = ""
        self.lasting = True
        self.recomputes = False
        self.asks_place = False
        self.asks_strides = False
        self._own: dict[int, Any] = {}
        self._given: dict[int, Any] = {}
        self._written: dict[tuple[int, Any], tuple[Any, Any, Any, str]] = {}
        self._lookups: dict[tuple[type, str], Any] = {}
        self._host: set[int] = set()
        self._inside: set[int] = set()
        self._given_tensors: set[int] = set()
        self.watchdog: Any = None
        self._note_given(given)

    def _note_given(self, x: Any) -> None:
        """Lists and dicts that are arguments: what is in them is compared anyway."""
        if type(x) in (list, dict, tuple, collections.OrderedDict):
            self._given[id(x)] = x
            for y in x.values() if is_a(x, dict) else x:
                self._note_given(y)
        elif is_a(x, torch.Tensor):
            self._given_tensors.add(id(x))
            self.read_tensor(x, given=True)

    # -- verdicts -------------------------------------------------------------------------------------

    def refuse(self, reason: str, lasting: bool = True) -> None:
        """Nothing may be concluded from this run."""
        if not self.reason:
            self.reason = f"{reason} ({source.short_line() or 'no line'})"
            self.lasting = lasting
            if self.watchdog is not None:
                self.watchdog.stop()

    def release(self) -> None:
        """Let go of what the run was given and made."""
        self._own.clear()
        self._given.clear()
        self.watchdog = None
        self.reads = _ignore
        self.conditions.prune()

    @contextlib.contextmanager
    def unwatched(self) -> Iterator[None]:
        """While something runs that is known."""
        before = sys.getprofile()
        sys.setprofile(None)
        try:
            yield
        finally:
            sys.setprofile(before)

    def effect(self, reason: str) -> None:
        """The same for a change of something that was there before: a first call may make it, and later ones not."""
        self.refuse(reason, lasting=False)

    def given_parameter(self, x: object) -> bool:
        """Whether it is a parameter among the arguments: while it is recorded, its place is taken by a tensor."""
        return is_a(x, torch.Tensor) and getattr(x, "_is_param", False) and id(x) in self._given_tensors

    def end(self) -> None:
        """The run is over: what it wrote must be as it was."""
        for space, key, before, label in self._written.values():
            if _read(space, key) is not before:
                self.effect(f"its forward changes {label}")

    # -- what is its own ------------------------------------------------------------------------------

    def own(self, x: object) -> Any:
        """Something that the run made."""
        self._own[id(x)] = x
        return x

    def is_own(self, x: object) -> bool:
        """Whether the run made it."""
        return id(x) in self._own

    def is_given(self, x: object) -> bool:
        """Whether it is a list or dict among the arguments."""
        return id(x) in self._given

    def follows(self, x: object) -> bool:
        """Whether what is in an object follows from the rest: it is plain, the run's own, or an argument."""
        return unchanging(x) or is_a(x, torch.Tensor) or id(x) in self._own or id(x) in self._given

    # -- reading --------------------------------------------------------------------------------------

    def entry(self, holder: Any, space: dict[Any, Any], key: Any, label: str) -> Any:
        """What a dict that was there before has under a key: MISSING if nothing. holder: the object whose dict it is, or the dict."""
        value = dict.get(space, key, MISSING)
        if self.is_own(holder) or self.is_given(space) or self.is_own(space) or (id(space), key) in self._written:
            return value
        self.conditions.entry(space, key, value, label)
        return self.seen(value)

    def seen(self, value: Any) -> Any:
        """Something that was read from the outside."""
        if is_a(value, torch.Tensor):
            self.read_tensor(value)
        elif is_a(value, tuple):
            for part in tuple.__iter__(value):
                self.seen(part)
        return value

    def read_tensor(self, t: torch.Tensor, given: bool = False) -> None:
        """A tensor that was there before."""
        if is_a(t, XLATensor):
            if not given and self.reads(t):
                self.conditions.tensor(t)
        elif t.device.type == "cpu" and t.layout is torch.strided and type(t) in (torch.Tensor, torch.nn.Parameter):
            self._host.add(t.untyped_storage().data_ptr())
            if t.nbytes > BYTES:
                self.refuse(f"it reads a CPU tensor of {t.nbytes} bytes; move it to xla, or make it a buffer")
            else:
                self.conditions.question(_contents, (t,), _contents(t), f"the contents of a CPU tensor of shape {list(t.shape)}")
        elif t.device.type != "meta":
            self.refuse(f"it reads a {type(t).__name__} on {t.device}")

    def may_write_host(self, t: torch.Tensor) -> bool:
        """Whether an in-place op on a CPU tensor stays within the run."""
        return is_a(t, XLATensor) or t.device.type != "cpu" or t.untyped_storage().data_ptr() not in self._host

    def array(self, x: np.ndarray) -> None:
        """The contents of an array."""
        if self.is_own(x):
            return
        self._host.add(x.__array_interface__["data"][0])
        if x.nbytes > BYTES or x.dtype.hasobject:
            self.refuse(f"it reads a numpy array of {x.nbytes} bytes; make it a buffer")
        else:
            self.conditions.question(_array, (x,), _array(x), "the contents of a numpy array")

    def elements(self, x: Any, label: str = "") -> None:
        """Everything that a container holds, and what that holds in turn."""
        if self.follows(x):
            for y in x if is_a(x, (tuple, list)) else ():
                if is_a(y, _CONTAINERS) and not self.follows(y):
                    self.elements(y, label)
            return
        if (is_a(x, _CONTAINERS) or is_a(x, tuple)) and id(x) not in self._inside:
            self._inside.add(id(x))
            written = frozenset(key for space, key in self._written if space == id(x))
            if written:
                self.conditions.question(_others, (x, written), _others(x, written), label or f"the elements of a {type(x).__name__}")
            elif not is_a(x, tuple):
                self.conditions.elements(x, label or f"the elements of a {type(x).__name__}")
            for y in [*x.keys(), *x.values()] if is_a(x, dict) else x:
                if not is_a(x, tuple):
                    self.seen(y)
                if is_a(y, (*_CONTAINERS, tuple)) and not self.follows(y):
                    self.elements(y, label)
            self._inside.discard(id(x))

    def lookup(self, cls: type, name: str) -> Any:
        """What instances of a class find under a name in it and its bases, unbound; MISSING if nothing."""
        found = self._lookups.get((cls, name), self)
        if found is self:
            found = MISSING
            if _can_change(cls):
                self.conditions.order(cls)
            for base in cls.__mro__:
                value = vars(base).get(name, MISSING)
                if _can_change(base):
                    self.conditions.class_entry(base, name, value)
                if value is not MISSING:
                    found = value
                    break
            self._lookups[cls, name] = found
        return found

    def function(self, f: types.FunctionType, names: tuple[str, ...]) -> None:
        """A function that is about to run: its code, defaults, cells, and the globals that it names."""
        if self.is_own(f):
            return
        self.conditions.function(f)
        if f.__kwdefaults__:
            self.conditions.elements(f.__kwdefaults__, f"the defaults of {f.__qualname__}")
        for value in (*(f.__defaults__ or ()), *(f.__kwdefaults__ or {}).values()):
            self.seen(value)
        for name, cell in zip(f.__code__.co_freevars, f.__closure__ or (), strict=True):
            if name != "__class__" and id(cell) not in self._own:
                self.conditions.cell(cell)
                with contextlib.suppress(ValueError):  # not assigned yet
                    self.seen(cell.cell_contents)
        space = f.__globals__
        builtins = space.get("__builtins__", {})
        builtins = vars(builtins) if is_a(builtins, types.ModuleType) else builtins
        for name in names:
            if name in space:
                self.entry(space, space, name, f"the global {name}")
            else:
                self.conditions.entry(space, name, MISSING, f"the global {name}")
                self.conditions.entry(builtins, name, builtins.get(name, MISSING), f"the builtin {name}")

    # -- writing --------------------------------------------------------------------------------------

    def writes(self, holder: object, space: Any, key: object, label: str) -> None:
        """An entry of a dict (or a context variable) that was there before is about to change: it must be what it was in the end."""
        if not self.is_own(holder) and (id(space), key) not in self._written:
            before = _read(space, key)
            if is_a(space, dict):
                self.conditions.entry(space, key, before, label)
            self._written[id(space), key] = space, key, before, label

    def wrote(self, space: Any, key: object) -> bool:
        """Whether the run has written there."""
        return (id(space), key) in self._written


def _ignore(t: torch.Tensor) -> bool:
    """Nobody follows which tensors the run makes itself."""
    return True


def _others(x: dict[Any, Any], left_out: frozenset[Any]) -> tuple[Any, ...]:
    """Entries of a dict but for some keys, flat."""
    return tuple(part for key, value in dict.items(x) if key not in left_out for part in (key, value))


def _read(space: Any, key: object) -> Any:
    return dict.get(space, key, MISSING) if is_a(space, dict) else space.get(MISSING)


def _can_change(cls: type) -> bool:
    """Whether attributes of a class can be set: not of those in C."""
    return bool(cls.__flags__ & HEAP) or cls is torch.Tensor


def _contents(t: torch.Tensor) -> Any:
    return t.dtype, tuple(t.shape), t.stride(), t.requires_grad, bits(t)


def _array(x: np.ndarray) -> Any:
    return x.shape, x.dtype.str, x.tobytes()


def run(function: Callable[..., Any], args: Args, kwargs: Kwargs, observer: Observer) -> Any:
    """Call a function with everything that it does routed through the observer."""
    before, ACTIVE.observer = ACTIVE.observer, observer
    try:
        with Watchdog(observer) as watchdog:
            observer.watchdog = watchdog
            return observer.caller(observer, function, args, kwargs)
    finally:
        ACTIVE.observer = before
        observer.end()


class Watchdog:
    """Sees every Python function that starts while a thread is observed: one that is neither routed nor a library's ends the conclusions.

    Python's garbage collector runs when it is due, whatever code that meets: what runs inside it (`gc.callbacks`, finalizers of cycles) is not the forward's.
    """

    def __init__(self, observer: Observer):
        self._observer = observer
        self._thread = threading.get_ident()
        self._collecting = False
        self._hook = self._event  # kept: the interpreter borrows it while it runs, and it may end itself
        self.allowed: set[types.CodeType] = {Watchdog._collects.__code__, Watchdog._collected.__code__}
        self._known: dict[types.CodeType, bool] = {}

    def __enter__(self) -> Watchdog:
        if sys.getprofile() is not None or sys.gettrace() is not None:  # they go on seeing what they would see
            self._observer.refuse("a profiler or a tracer follows this thread", lasting=False)
        else:
            gc.callbacks.insert(0, self._collects)
            gc.callbacks.append(self._collected)
            sys.setprofile(self._hook)
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Look away."""
        self._collecting = False
        for callback in (self._collects, self._collected):
            if callback in gc.callbacks:
                gc.callbacks.remove(callback)
        if sys.getprofile() is self._hook:
            sys.setprofile(None)

    def _collects(self, phase: str, info: dict[str, int]) -> None:
        """The first of `gc.callbacks`."""
        if phase == "start" and threading.get_ident() == self._thread and sys.getprofile() is self._hook:
            sys.setprofile(None)
            self._collecting = True

    def _collected(self, phase: str, info: dict[str, int]) -> None:
        """The last of them."""
        if phase == "stop" and self._collecting and threading.get_ident() == self._thread:
            self._collecting = False
            sys.setprofile(self._hook)

    def _event(self, frame: types.FrameType, event: str, arg: object) -> None:
        if event != "call" or self._observer.reason:
            return
        code = frame.f_code
        found = self._known.get(code)
        if found is None:
            found = code in ROUTED or is_library(code)
            if code.co_filename.startswith("<string>"):  # made by dataclasses or namedtuple: a library's own if the library calls it
                found = _library_calls(frame)
            else:
                self._known[code] = found
        importing = None if found else _importing(frame)
        if importing is not None:
            if not is_library(importing):
                self._observer.refuse("it imports a module", lasting=False)
        elif not found and code not in self.allowed:
            self._observer.refuse(f"it runs {code.co_qualname}, called from code that cannot be followed")


def _library_calls(frame: types.FrameType) -> bool:
    """Whether a library calls generated code, directly or by way of other such code (the hash of a dataclass asks for those of its fields)."""
    back = frame.f_back
    while back is not None and back.f_code not in ROUTED and back.f_code.co_filename.startswith("<string>"):
        back = back.f_back
    return back is not None and is_library(back.f_code)


def _importing(frame: types.FrameType) -> types.CodeType | None:
    """The code whose import statement led to a frame, if one did since the last routed code."""
    back: types.FrameType | None = frame
    through = False
    while back is not None and back.f_code not in ROUTED:
        imports = back.f_code.co_filename.startswith("<frozen importlib")
        if through and not imports:
            return back.f_code
        through, back = through or imports, back.f_back
    return back.f_code if through and back is not None else None
