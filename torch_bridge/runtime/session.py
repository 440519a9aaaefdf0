"""The session: what has been recorded and not run yet, and the programs that ran, as one object that a context manager swaps.

A process has one session that all its threads share. A capture, an abstract run or a thread that must not touch it opens one of its own:

    with session.opened() as own:
        ...  # recorded in `own`; programs are compiled and kept there

Tensors go from one session to another: what waits in another session runs there when its value is needed.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from torch_bridge.compiler.history import History
from torch_bridge.ir.segment import LOCK, Results, Segment
from torch_bridge.mesh import abstract_arrays
from torch_bridge.runtime.cold_shapes import ColdShapes
from torch_bridge.runtime.in_flight import InFlight
from torch_bridge.runtime.observers import Observer

if TYPE_CHECKING:
    import torch

    from torch_bridge.compiler.program import Program
    from torch_bridge.compiler.program_spec import Execution
    from torch_bridge.compiler.trace import Trace
    from torch_bridge.mesh.places import Place
    from torch_bridge.runtime.abstract import Run

RECENT = 16
"""Programs that ran last, of which a session keeps the order."""


CHECKS: list[Observer] = []
"""Observers of every session: what the environment switches on."""


def check_with(observer: Observer) -> None:
    """Tell an observer of every session, from now on; once."""
    if observer not in CHECKS:
        CHECKS.append(observer)
        for session in sessions():
            session.observe(observer)


class CpuConstants(Protocol):
    """What CPU tensors are in a graph that is captured (`export.cpu_constants`). everywhere: all the module has is on the CPU for the script."""

    everywhere: bool

    def of(self, t: torch.Tensor) -> Any:
        """The xla tensor that it is to be read as."""

    def own(self, t: torch.Tensor) -> Any:
        """The same for the module's own tensors and their views; None for others."""

    def target(self, t: torch.Tensor) -> Any:
        """The xla tensor that is written to in its place. Raises RuntimeError if there is none."""


class Session:
    """A segment that is being recorded, the structures and programs known to it, and who is told of what it does.

    Attributes:
        current: the pending segment. It is replaced when it runs.
        traces: structures seen before, with their programs, by their nodes.
        cold_shapes: of which structures so many programs were compiled that further ones run in eager torch first.
        alike: the structure seen last of those that differ in numbers alone (`automatic_dynamic`).
        by_start: the structure that began with a node last.
        last: the structure that ran last.
        recent: the programs that ran last, newest last.
        in_flight: executions that may not have finished.
        clock: counts executions.
        hoisted: hashes of structures whose constants became inputs (`hoist_constants`).
        history: what was compiled, and what Python read from tensors.
        deferred: parts of segments that are still to run (`executor.Deferred`).
        closures: called at the end of the step: (function, arguments, whether on a thread of its own).
        observers: told of compilations, executions, step ends and reads (`observers.Observer`).
        abstract: the abstract run, None where tensors have values.
        placement: says for each node of a segment where it runs: nodes at different places become programs of their own, in the order that their values
            ask for. None: each runs where its inputs lie (`passes.place_nodes`).
        cpu_constants: what CPU tensors are that a module which is captured has next to its own. None: such a tensor is an error.
        kinds: hashes of the kinds of operands that ops on many small tensors had, by op (`recorder.sampled_lists`).
        started: a program that runs for the segment which is still being recorded (`speculation`).
        noting: told of every run of a program before it, if somebody wants to run it again by itself (`replay.rerun`).
    """

    run: ClassVar[Callable[[Session], None]]
    """Run what a session has recorded (`executor`)."""

    def __init__(self, observers: tuple[Observer, ...] | None = None, abstract: Run | None = None, capture: bool = False):
        self.traces: dict[tuple[Any, ...], Trace] = {}
        self.cold_shapes = ColdShapes()
        self.alike: dict[tuple[Any, ...], Trace] = {}
        self.by_start: dict[tuple[Any, ...], Trace] = {}
        self.last: Trace | None = None
        self.recent: deque[Program] = deque(maxlen=RECENT)
        self.in_flight = InFlight()
        self.clock = itertools.count(1)
        self.hoisted: set[int] = set()
        self.history = History()
        self.deferred: weakref.WeakSet[Any] = weakref.WeakSet()
        self.closures: list[tuple[Callable[..., Any], tuple[Any, ...], bool]] = []
        self.observers = tuple(CHECKS) if observers is None else observers
        self.abstract = abstract
        self.placement: Callable[[Segment], Sequence[Place]] | None = None
        self.cpu_constants: CpuConstants | None = None
        self.kinds: dict[tuple[Any, ...], set[int]] = {}
        self.started: Any = None
        self.noting: Callable[[Program, Execution, Sequence[Any], Results], None] | None = None
        self.current = Segment(capture, self.by_start, self)
        _ALL.add(self)

    def begin(self) -> Segment:
        """A new pending segment; the one before forgets what it has, and lets go of the arrays, unless some of it is still to run."""
        self.started = None
        before, self.current = self.current, Segment(by_start=self.by_start, owner=self)
        if before.deferred is None:
            before.clear()
        return self.current

    def finish(self, segment: Segment) -> None:
        """Run a segment of this session that another one needs a value of, if it is still pending."""
        if segment.deferred is not None:
            segment.deferred.run()
        elif segment is self.current and not segment.capture:
            with activated(self):
                self.run()

    def programs_alone(self) -> bool:
        """Whether all who observe it ask for programs alone, not for segments."""
        return all(observer.programs_alone for observer in self.observers)

    def runs_as_usual(self) -> bool:
        """Whether nobody follows what segments become, or has them run otherwise."""
        return self.abstract is None and self.placement is None and self.programs_alone()

    def observe(self, observer: Observer) -> None:
        """Tell an observer from now on; once, if it is told already."""
        if not any(one is observer for one in self.observers):
            self.observers = (*self.observers, observer)

    def unobserve(self, observer: Observer) -> None:
        """Tell it no more."""
        self.observers = tuple(one for one in self.observers if one is not observer)


_ALL: weakref.WeakSet[Session] = weakref.WeakSet()


class _Thread(threading.local):
    """session: that of this thread, the process's own unless it opened another."""

    session = Session()


STATE = _Thread()


def current() -> Session:
    """The session of this thread."""
    return STATE.session


def sessions() -> list[Session]:
    """Those that somebody still has."""
    return list(_ALL)


@contextlib.contextmanager
def activated(session: Session) -> Iterator[Session]:
    """A block in which this thread records in `session`. What it does is not seen from outside: a module that is being recorded is not played then."""
    outer = STATE.session
    if session is not outer:
        outer.current.asked()
    STATE.session, abstract_arrays.ACTIVE.run = session, session.abstract
    try:
        yield session
    finally:
        STATE.session, abstract_arrays.ACTIVE.run = outer, outer.abstract


@contextlib.contextmanager
def opened(session: Session | None = None) -> Iterator[Session]:
    """A block with a session of its own, which other threads and the session around it know nothing of. What it has recorded runs at its end.

    After an exception what is still recorded runs when somebody asks for its values.
    """
    with activated(Session() if session is None else session) as own:
        yield own
        with LOCK:
            if own.current.nodes and not own.current.capture:
                own.run()


def bound(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A function for another thread that records in the session of this one."""
    session = STATE.session

    @functools.wraps(fn)
    def run(*args: Any, **kwargs: Any) -> Any:
        with activated(session):
            return fn(*args, **kwargs)

    return run
