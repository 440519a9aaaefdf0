"""Looks at a script while it runs, and ends it when it has seen enough."""

from __future__ import annotations

import contextlib
import logging
import pathlib
from typing import Any

from nxd_jax.inspect import nodes
from nxd_jax.inspect.inspection import Inspection
from nxd_jax.inspect.looking import look
from nxd_jax.inspect.profiling import Profile, profile
from nxd_jax.inspect.replay import PlayedModule, modules
from nxd_jax.inspect.timeline import Watch as StepWatch
from nxd_jax.inspect.timeline_step import PipelineStep
from nxd_jax.pipeline import observers, step_log
from torch_bridge.mesh import abstract_arrays
from torch_bridge.runtime import executor, session
from torch_bridge.runtime.observers import Observer

logger = logging.getLogger("nxd_jax")


class Stopped(BaseException):
    """Ends a script that has run long enough. No `Exception`, for scripts catch those."""


class Watch(Observer):
    """Use it as a context manager around a script. At each mark it looks at the largest program so far, the training step as a rule.

    runs: how often that program runs before the script is ended by `Stopped`; 0: the script runs to its end. profiled: how many of the last of these runs are
    profiled, 0 in an abstract run. folder: where the profile's trace goes and stays, None: it is removed. Afterwards `inspection` is of
    that program (None if nothing ran), and `profile` of these steps, or None; `modules` are those to be played from recordings, at the last mark with any.

    Where the script trains a pipeline, its steps are counted instead, and measured (`inspect.pipeline`) unless they are profiled: `pipeline`.
    """

    def __init__(self, runs: int, profiled: int = 0, folder: pathlib.Path | None = None):
        self.runs = runs
        self.profiled = min(profiled, max(runs - 1, 0))
        self.folder = folder
        self.inspection: Inspection | None = None
        self.profile: Profile | None = None
        self.modules: tuple[PlayedModule, ...] = ()
        self._steps = StepWatch(None, PipelineStep())
        self._program: Any = None
        self._of_step: set[Any] = set()
        self._before: dict[Any, int] = {}
        self._block = contextlib.ExitStack()

    def __enter__(self) -> Watch:
        executor.sync()
        self._before = {
            p: p.executions for trace in session.current().traces.values() for programs in trace.programs.values() for p in programs
        }
        self._session = session.current()
        self._session.observe(self)
        observers.observe(self._steps)
        return self

    def __exit__(self, *error: Any) -> None:
        self._session.unobserve(self)
        observers.unobserve(self._steps)
        self._block.close()

    @property
    def pipeline(self) -> PipelineStep | None:
        """The last measured step of a pipeline, or its schedule alone in an abstract run; None: there is no pipeline."""
        return self._steps.result if self._steps.steps else None

    def look(self) -> None:
        """Look at what ran so far; the watch does so at each mark. What runs again and again counts more than what ran once, at the start."""
        self.modules = modules() or self.modules  # they are gone when the script's functions have returned
        if self._steps.steps:
            self._look_at_pipeline()
            return
        found = max(self._programs(), key=lambda p: _size(p) * min(self._runs(p), 2), default=None)
        if found is not None and found is not self._program:
            self._program = found
            self.inspection = look(found)
            self._note()

    def _look_at_pipeline(self) -> None:
        """All programs of the last training step, anew if there are others than before."""
        programs = set(step_log.LOG.ran)
        if programs != self._of_step:
            self._of_step = programs
            self.inspection = look()
            self._note()

    def _runs(self, program: Any) -> int:
        """How often it ran since the watch began."""
        if self._steps.steps:
            return self._steps.steps
        recorded = None if abstract_arrays.ACTIVE.run is None else abstract_arrays.ACTIVE.run.programs.get(id(program))
        return program.executions - self._before.get(program, 0) if recorded is None else recorded.runs

    def _programs(self) -> list[Any]:
        """Those that ran since the watch began, the one looked at first: it wins a tie."""
        if abstract_arrays.ACTIVE.run is not None:
            return [r.program for r in abstract_arrays.ACTIVE.run.programs.values()]
        recent = [p for p in session.current().recent if p.executions > self._before.get(p, 0)]
        return recent if self._program is None else [self._program, *recent]

    def _note(self) -> None:
        """What cannot be found out later: whose tensors they are, and the trace, which needs the ranks as they are laid out now."""
        assert self.inspection is not None
        try:
            _ = self.inspection.memory, self.inspection.jaxpr, self.inspection.collectives, self.inspection.costs
        except Exception as error:
            logger.info("nxd-inspect cannot look at a program yet: %s: %s", type(error).__name__, error)

    def step_ended(self, ran: bool) -> None:
        """Look, and stop the script after enough runs."""
        executor.sync()
        self.look()
        if self.inspection is None or not self.runs:
            return
        runs = self._runs(self._program)
        if runs >= self.runs:
            self._block.close()
            raise Stopped
        if self.profiled and self.profile is None and runs >= self.runs - self.profiled:
            self._steps.paused = True
            self.profile = self._block.enter_context(profile(self.folder))


def _size(program: Any) -> int:
    return nodes.ops(program.graph)
