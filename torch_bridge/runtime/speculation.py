"""Speculative execution: the program of a training step starts while the script still records the step.

A step that reads its loss waits for its program, which waits for the Python of the step. Once a structure has run twice, what its next run takes is mostly
known before the end: weights and states are what their storages hold, batches come with the first ops, an optimizer says its next numbers (`foretell`). Then
the program starts as soon as the last input that nobody can foretell is recorded. When the step has been recorded, its arguments are put together as ever; if
each is the same object as that of the program that runs (or has the same bytes), its results are taken. If not, they are dropped, and the step runs in the
ordinary way. A program that may start early takes nothing over (`compiler.kept_inputs`), so nothing is lost either way.

Only small training steps do so: their time is that of Python, and their old state fits beside the new one.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np

from torch_bridge import _compat, metrics
from torch_bridge.compiler.program_spec import Execution
from torch_bridge.config.settings import SETTINGS
from torch_bridge.identity import any_is
from torch_bridge.ir.segment import NEVER, Segment
from torch_bridge.mesh import places
from torch_bridge.passes import scalar_inputs
from torch_bridge.precision import precision_mode
from torch_bridge.runtime import interrupts

if TYPE_CHECKING:
    from torch_bridge.compiler.program import Program
    from torch_bridge.compiler.trace import Trace
    from torch_bridge.runtime.session import Session

logger = logging.getLogger("torch_bridge")

_LONGEST = 4096
"""Runs that pass at most before the next try."""
_RIGHT = 12
"""So many tries that were right in a row make those that were not forgotten: one run in 19 is in vain at most."""
_HELD, _PENDING = map(attrgetter, ("held", "pending"))


class Forecast:
    """What the next run of a structure is expected to take.

    holders: by leaf, the storage that it came from in the last run. numbers: the lifted Python numbers of that run. foretold: what says a node's next ones.
    at: the node with which everything is known, `NEVER` while that is not known. rest: runs to let pass before it learns anew. wrong, right: tries in vain,
    and others since.
    """

    def __init__(self, trace: Trace, program: Program):
        self.trace = weakref.ref(trace)
        self.program = program
        self.at = NEVER
        self.rest = 0
        self.wrong = self.right = 0
        self.holders: list[Any] = []
        self.numbers: list[tuple[int, tuple[Any, ...]]] = []
        self.foretold: dict[int, Any] = {}

    def learn(self, segment: Segment) -> None:
        """From a run: which storages the leaves came from; from two, which will come from the same ones again."""
        saved = dict(zip(segment.saved_leaves, segment.saved, strict=True))
        holders_before, numbers_before = self.holders, self.numbers
        self.holders = [segment.holders.get(-k - 1) or saved.get(-k - 1) for k in range(len(segment.leaves))]
        self.numbers, self.foretold = list(segment.numbers), dict(segment.foretold)
        if len(holders_before) != len(self.holders) or len(numbers_before) != len(self.numbers):
            return
        new = {-k - 1 for k, (was, now) in enumerate(zip(holders_before, self.holders, strict=True)) if now is None or was is not now}
        last = max((i for i, _, _ in segment.draws), default=0)
        for was, now in zip(numbers_before, self.numbers, strict=True):
            if was != now and now[0] not in self.foretold:
                last = max(last, now[0])
        for i, node in enumerate(segment.nodes):
            if not new:
                break
            if not new.isdisjoint(node[1:]):
                new.difference_update(node[1:])
                last = max(last, i)
        if new or last + 1 >= len(segment.nodes):
            self._wait()
        else:
            self.at = last

    def start(self, segment: Segment, session: Session) -> None:
        """Start the program with what it is expected to take, unless the devices are busy anyway or something is not there."""
        if segment is not session.current or segment.predicted is not self.trace() or segment.predicted is None or not _may(session):
            return
        try:
            if not session.in_flight.is_idle():  # the script is ahead of the devices: nothing to gain
                return
            run = self._execution(segment)
            if run is None or not self.program.has_executable or not self.program.spec.accepts(run):
                self.was_wrong()
                return
            args = self.program.arguments(run, {})
            with interrupts.deferred(), _compat.enable_x64():
                session.started = Started(self, self.program, args, self.program.run(args))
        except Exception as error:  # the ordinary way raises it, if it is one of the step
            logger.debug("a program that was to start early did not: %s: %s", type(error).__name__, error)
            self.was_wrong()

    def _execution(self, segment: Segment) -> Execution | None:
        """The run that is expected, None if a storage has no value or an optimizer does not say its numbers."""
        leaves = list(segment.leaves)
        storages = [ref() for ref in self.holders[len(leaves) :]]
        if len(leaves) > len(self.holders) or any_is(storages, None):
            return None
        arrays = list(map(_HELD, storages))
        if any_is(arrays, None) or any(map(_PENDING, storages)):
            return None
        recorded = len(segment.nodes)
        numbers = [given for given in segment.numbers if given[0] < recorded]
        for i, values in self.numbers:
            if i >= recorded:
                foretell = self.foretold.get(i)
                values = values if foretell is None else foretell()
                if values is None:
                    return None
                numbers.append((i, values))
        seen = Segment()
        seen.leaves, seen.draws = leaves + arrays, list(segment.draws)
        flat: dict[type, Any] = {kind: scalar_inputs.flat(numbers, kind) for kind in (float, int)}
        return Execution(seen, (False,) * len(seen.leaves), flat, mode=precision_mode.current())

    def was_right(self) -> None:
        """A step took what had started."""
        metrics.count("SpeculativeExecution")
        self.right += 1
        if self.right >= _RIGHT:
            self.wrong = self.right = 0

    def was_wrong(self) -> None:
        """It did not, or nothing could start: learn anew, and wait longer each time."""
        metrics.count("SpeculativeExecutionDropped")
        self._wait()

    def _wait(self) -> None:
        self.wrong += 1
        self.right = 0
        self.rest = min(4**self.wrong, _LONGEST)
        self.forget()

    def forget(self) -> None:
        """What was learned does not hold any more."""
        self.at, self.holders = NEVER, []


class Started:
    """A program that runs for a step which is still being recorded."""

    def __init__(self, forecast: Forecast, program: Program, args: list[Any], results: list[Any]):
        self.forecast = forecast
        self.program = program
        self.args = args
        self.results = results


def expect(session: Session, segment: Segment, trace: Trace | None) -> None:
    """A segment begins, and a structure is expected: have its program started as soon as everything it takes is known."""
    forecast = None if trace is None else trace.forecast
    if forecast is not None and forecast.at != NEVER:
        segment.start_at = forecast.at
        segment.start = lambda segment: forecast.start(segment, session)


def learn(session: Session, trace: Trace, programs: Sequence[Program], run: Execution) -> None:
    """Take note of a run that is about to begin."""
    program = programs[0]
    if len(programs) > 1 or not program.spec.keeps_inputs or not _may(session):
        return
    forecast = trace.forecast
    if forecast is None:
        forecast = trace.forecast = Forecast(trace, program)
    elif forecast.program is not program:  # other values are needed this time: the tries in vain count on
        forecast.program = program
        forecast.forget()
    if forecast.rest:
        forecast.rest -= 1
    elif forecast.at == NEVER:
        forecast.learn(run.segment)


def keep_for(session: Session, trace: Trace | None) -> None:
    """A structure is about to run (None: one that was not foretold): what has started for another one is of no use, and must not hold buffers any more."""
    started = session.started
    if started is not None and (trace is None or started.forecast.trace() is not trace):
        session.started = None
        started.forecast.was_wrong()


def taken(session: Session, program: Program, args: Sequence[Any]) -> list[Any] | None:
    """The results of a program that has started early, if it is this one and was given just these arguments."""
    started, session.started = session.started, None
    if started is None:
        return None
    forecast = started.forecast
    if started.program is program and len(args) == len(started.args) and all(map(_same, started.args, args)):
        forecast.was_right()
        return started.results
    forecast.was_wrong()
    return None


def _same(one: Any, other: Any) -> bool:
    """Whether two arguments are one object, or hold the same bytes on the host."""
    if one is other:
        return True
    if type(one) is not np.ndarray or type(other) is not np.ndarray:
        return False
    return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()


def _may(session: Session) -> bool:
    """Whether programs run as usual, and may run while the script does."""
    return (
        session.abstract is None
        and session.noting is None
        and not places.in_use()
        and SETTINGS.max_in_flight > 0
        and not SETTINGS.extract_only
    )
