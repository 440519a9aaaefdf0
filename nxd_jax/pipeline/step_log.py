"""Which programs the last training step of a pipeline ran, and what its stages sent one another: for those who look afterwards (`nxd_jax.inspect`)."""

from __future__ import annotations

import contextlib
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

from nxd_jax.pipeline import observers
from nxd_jax.pipeline.schedules import Action, Kind, Schedule
from torch_bridge.runtime import session
from torch_bridge.runtime.observers import QUIET, Observer, Phase

if TYPE_CHECKING:
    from nxd_jax.pipeline.model import NxDPPModel
    from torch_bridge.compiler.program import Program
    from torch_bridge.mesh.places import Place


class Task(NamedTuple):
    """What a program is a part of: all micro-batches of one kind of computation of a stage."""

    stage: int
    kind: Kind


class Sent(NamedTuple):
    """What one stage sends another in a step, in bytes on a core. kind: FORWARD for results, another for gradients."""

    source: int
    target: int
    kind: Kind


class StepLog(observers.StepObserver, Observer, contextlib.AbstractContextManager[None]):
    """Of the last training step: from the start of its passes to the end of the step, so with the optimizer's.

    Attributes:
        steps: how many there were in this process.
        schedule: of the pipeline, None before the first step.
        homes: by stage, its place.
        ran: by program, how often it ran for each task; for None outside of the passes (the optimizer, say).
        sent: how often stages sent one another something, and the bytes on a core.
    """

    programs_alone = True

    def __init__(self) -> None:
        self.steps = 0
        self.schedule: Schedule | None = None
        self.homes: list[Place | None] = []
        self.ran: weakref.WeakKeyDictionary[Program, dict[Task | None, int]] = weakref.WeakKeyDictionary()
        self.sent: dict[Sent, tuple[int, int]] = {}
        self._doing: Task | None = None
        self._next: Task | None = None
        self._session: session.Session | None = None

    # -- what the pipeline tells ----------------------------------------------------------------------

    def step(self, model: NxDPPModel) -> observers.Block:
        """A step begins: forget the one before."""
        self.steps += 1
        self.schedule, self.homes = model.schedule, list(model.homes)
        self.ran, self.sent = weakref.WeakKeyDictionary(), {}
        self._listen(session.current())
        return QUIET

    def action(self, action: Action) -> observers.Block:
        """A computation: the log itself is the block around it, as there is one for each of a hundred in a step."""
        self._next = Task(action.stage, action.kind)
        return self

    def __enter__(self) -> None:
        self._doing = self._next

    def __exit__(self, *_: object) -> None:
        self._doing = None

    def moved(self, source: Place, target: Place, size: int) -> None:
        """A tensor goes from one place to another."""
        doing = self._doing
        if doing is None:
            return
        there, here = self._stage_at(source, doing.stage), self._stage_at(target, doing.stage)
        key = Sent(there, here, doing.kind)
        count, total = self.sent.get(key, (0, 0))
        self.sent[key] = count + 1, total + size

    def _stage_at(self, place: Place, doing: int) -> int:
        """The stage at a place; of several the one that computes, or its neighbour."""
        found = [k for k, home in enumerate(self.homes) if home == place]
        return min(found, key=lambda k: abs(k - doing)) if found else doing

    # -- what the session tells -----------------------------------------------------------------------

    def _listen(self, now: session.Session | None) -> None:
        if self._session is not None and self._session is not now:
            self._session.unobserve(self)
        if now is not None and self._session is not now:
            now.observe(self)
        self._session = now

    def phase(self, phase: Phase, program: Program | None) -> contextlib.AbstractContextManager[None]:
        if phase == "dispatch" and program is not None:
            tasks = self.ran.setdefault(program, {})
            tasks[self._doing] = tasks.get(self._doing, 0) + 1
        return QUIET

    def step_ended(self, ran: bool) -> None:
        """What runs from now on belongs to no step of the pipeline."""
        if ran:
            self._listen(None)


LOG = StepLog()
"""Of this process's pipelines."""


def keep() -> None:
    """Have the log kept from now on."""
    if LOG not in observers.observed():
        observers.observe(LOG)


def last(programs: set[Any] | None = None) -> StepLog | None:
    """The log of the last step, if there was one whose programs are still there. programs: of those that are looked at, one must have run in it."""
    there = set(LOG.ran)
    wanted = there if programs is None else there & programs
    return LOG if LOG.schedule is not None and any(LOG.ran[p].keys() - {None} for p in wanted) else None
