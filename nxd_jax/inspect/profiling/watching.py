"""What the bridge does while a profile is recorded, noted in the trace: its phases and the ends of steps, and which programs ran.

Nothing of this costs anything outside a profile: the session tells its observers, and there is none. An annotation, `nxd:<phase>`, is
a span of the trace like any other, so that the phases also show in Perfetto and XProf and no two clocks have to be compared.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from torch_bridge.compiler.program import Program
from torch_bridge.runtime import session
from torch_bridge.runtime.observers import Observer, Phase

PREFIX = "nxd:"
"""How the names of our annotations begin."""
BEGIN, END, STEP = "begin", "end", "step"
"""Annotations that are moments: the recording began, it ended, a step ended."""
PHASES = ("record", "prepare", "compile", "dispatch", "wait")
"""What the host does. record: everything that is none of the others (the script's own Python, recording ops, loading data); prepare: from a recorded segment to
a program and its arguments; compile: JAX's tracing, XLA's compilation, or loading from the cache on disk; dispatch: handing a program to the devices; wait: for
the devices, and copying results from them."""


LINGER = 0.02
"""Seconds from the end of the recording to that of the trace: a result is there a moment before the span of the instruction that made it is closed."""


@dataclass(eq=False)
class Watched:
    """A program that ran. program: a `torch_bridge.compiler.program.Program`; runs: dispatched how often; compile_seconds: spent on compiling it here."""

    program: Any
    runs: int = 0
    compile_seconds: float = 0.0


class Watch(Observer, contextlib.AbstractContextManager["Watch"]):
    """Annotates the bridge's phases within the context.

    at_step: called after each step (`xm.mark_step` after which something had run), on its thread. programs: what was dispatched, in the order in which it was
    first seen, from `begin` to `end`.
    """

    def __init__(self, at_step: Callable[[], None]):
        self._at_step = at_step
        self._session = session.current()
        self._counting = False
        self.programs: dict[int, Watched] = {}

    def begin(self) -> None:
        """The recording begins: programs that run from now on are noted."""
        self.programs.clear()
        self._counting = True
        moment(BEGIN)

    def end(self) -> None:
        """The recording ends, once the devices have finished."""
        self._counting = False
        finish()
        moment(END)
        time.sleep(LINGER)

    def __enter__(self) -> Watch:
        self._session.observe(self)
        return self

    def __exit__(self, *error: object) -> None:
        self._session.unobserve(self)

    @contextlib.contextmanager
    def phase(self, phase: Phase, program: Program | None) -> Iterator[None]:
        """An annotation around a phase; what is compiled and dispatched is counted."""
        watched = self.programs.setdefault(id(program), Watched(program)) if self._counting and program is not None else None
        if watched is not None and phase == "dispatch":
            watched.runs += 1
        with annotation(phase):
            yield
        if watched is not None and phase == "compile":
            watched.compile_seconds += watched.program.compile_seconds

    def step_ended(self, ran: bool) -> None:
        """A moment in the trace, if something had run."""
        if ran:
            moment(STEP)
            self._at_step()


def annotation(name: str) -> jax.profiler.TraceAnnotation:
    """A span of ours in the trace, as a context manager."""
    return jax.profiler.TraceAnnotation(PREFIX + name)


def moment(name: str) -> None:
    """A moment in the trace (a span of no length)."""
    with annotation(name):
        pass


def finish() -> None:
    """Block until the devices have done everything that was handed to them, so that it is in the trace."""
    from torch_bridge.runtime import executor

    with annotation("wait"):
        executor.wait_all()
        for array in jax.live_arrays():  # also what was dispatched past the bridge
            if not array.is_deleted():
                with contextlib.suppress(jax.errors.JaxRuntimeError):  # raised where the array is used
                    array.block_until_ready()
        program, array = _last()
        program(array).block_until_ready()  # what nobody holds a result of; devices run programs in order


def nxd_profile_end(x: Any) -> Any:
    """A program that does nothing much, on every device of this process."""
    return x + 1


OWN_MODULE = "jit_nxd_profile_end"
"""What a trace calls it."""


@functools.cache
def _last() -> tuple[Any, Any]:
    devices = jax.local_devices()
    mesh = jax.sharding.Mesh(np.array(devices), ("device",))
    array = jax.device_put(np.zeros(len(devices), np.float32), jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("device")))
    return jax.jit(nxd_profile_end), array
