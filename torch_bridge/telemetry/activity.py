"""What the thread that runs programs notes down about its work, for `publisher` to tell `nxd-top`.

A program costs a few stores here: no lock, no file, no call into JAX. What takes longer is done when a program is compiled (its name) or
when the publishing thread has asked for it (memory).
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import logging
import operator
import time
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch_bridge.mesh import world

logger = logging.getLogger("nxd_jax")

STEP_TIMES_KEPT = 64


@dataclass
class Graph:
    """A program's graph in short.

    name: 8 hex digits, the same for the same ops on inputs of the same shapes in every process. ops: aten ops in it. source: 'file.py:line' of its last op
    that has a Python line, else ''.
    """

    name: str
    ops: int
    source: str
    _core_bytes: int = 0
    _program: weakref.ref[Any] | None = None

    def compiled(self, program: Any) -> None:
        """The `program.Program` is compiled."""
        self._program = weakref.ref(program)

    @property
    def core_bytes(self) -> int:
        """Device memory that each core needs while it runs (its inputs and results too), 0 where JAX cannot say.

        Asked when somebody reads it: JAX takes 40 ms for it, which are no part of a first step.
        """
        program = None if self._program is None else self._program()
        self._program = None
        if program is not None:
            self._core_bytes = _needed(program.compiled)
        return self._core_bytes


@dataclass
class Devices:
    """The devices that stand for the hosted ranks' cores, as measured last.

    used: bytes on each, in the order of the ranks. limit: bytes that one has, 0 if JAX cannot say (CPU). platform: JAX's name of their kind. count: devices
    that JAX has in all processes. seconds: what it took to find out.
    """

    used: tuple[int, ...]
    limit: int
    platform: str
    count: int
    seconds: float


@dataclass(eq=False)
class Activity:
    """Since the start of the process; written by the thread that runs programs, read by the publishing one.

    Attributes:
        programs: dispatched so far.
        steps: marks after which something had run; programs_at_step: `programs` at the last of them.
        step_times: when the last of them were, in `time.monotonic` seconds.
        dispatching: inside the call that hands a program to the device.
        output: a weak proxy of a result of the newest program.
        graph: the newest program's; ran_at: when it was dispatched, in seconds since the epoch.
        compiling: the graph that is being compiled, and since when, in seconds since the epoch.
        world: that of the newest compilation (another world compiles anew).
        devices: as measured last. asked: measure them after the next program.
    """

    programs: int = 0
    steps: int = 0
    programs_at_step: int = 0
    step_times: deque[float] = field(default_factory=lambda: deque(maxlen=STEP_TIMES_KEPT))
    dispatching: bool = False
    output: Any = None
    graph: Graph | None = None
    ran_at: float = 0.0
    compiling: tuple[Graph, float] | None = None
    world: world.World | None = None
    devices: Devices | None = None
    asked: bool = False

    def ran(self, graph: Graph | None, output: Any) -> None:
        """A program has been handed to the device; `output` is one of its results."""
        self.dispatching = False
        self.programs += 1
        self.graph = graph
        self.ran_at = time.time()
        self.output = weakref.proxy(output)
        if self.asked:
            self.asked = False
            with contextlib.suppress(Exception):  # a view of the job never fails it
                self.devices = measure()

    def step(self) -> bool:
        """A step has been marked. Marks with nothing run since the last one (a loader's after the script's own) are no steps: whether it is one."""
        if self.programs == self.programs_at_step:
            return False
        self.programs_at_step = self.programs
        self.steps += 1
        self.step_times.append(time.monotonic())
        return True

    def busy(self) -> bool:
        """Whether the device has work: a program is being handed over, or the newest one has not finished. Never blocks."""
        return self.dispatching or not _finished(self.output)


ACTIVITY = Activity()
"""Of this process."""


def in_words(of: Activity = ACTIVITY) -> str:
    """What a process does, for the others of its job: 'in step 7, compiling (train.py:12)'."""
    compiling, graph = of.compiling, of.graph
    if compiling is not None:
        return f"in step {of.steps + 1}, compiling{_at(compiling[0])}"
    return f"in step {of.steps + 1}, {f'running a program{_at(graph)}' if of.busy() else 'running Python'}"


def _at(graph: Graph | None) -> str:
    return f" ({graph.source})" if graph is not None and graph.source else ""


_deleted, _ready = operator.methodcaller("is_deleted"), operator.methodcaller("is_ready")


def _finished(output: Any) -> bool:
    """Whether the array behind a weak proxy has its value; True if it is gone.

    Between the two questions no Python code runs, so no other thread: `is_ready` of an array that was deleted meanwhile ends the process (jax 0.10), and a
    second reference, however short, would keep `executor` from donating the array.
    """
    if output is None:
        return True
    try:
        return bool(next(map(_ready, itertools.filterfalse(_deleted, (output,))), True))
    except (ReferenceError, RuntimeError):  # nobody has it any more; donated in this moment
        return True


@contextlib.contextmanager
def compiling(program: Any) -> Iterator[None]:
    """Around the compilation of a `program.Program`; the first one of the process starts the publishing thread."""
    from torch_bridge.telemetry import compile_log, publisher

    if not publisher.start():
        with compile_log.watched(program):
            yield
        return
    program.facts = graph = _described(program)
    ACTIVITY.world = world.current()
    ACTIVITY.compiling = graph, time.time()
    try:
        with compile_log.watched(program):
            yield
        graph.compiled(program)
        ACTIVITY.asked = True
    finally:
        ACTIVITY.compiling = None


def _described(program: Any) -> Graph:
    try:
        return describe(program)
    except Exception as error:
        logger.debug("nxd-top will not know what this graph is: %s: %s", type(error).__name__, error)
        return Graph("?", 0, "")


def describe(program: Any) -> Graph:
    """A program's graph in short, before it is compiled."""
    calls = [node for node in program.graph.nodes if node.op == "call_function" and getattr(node.target, "namespace", None)]
    inputs = [(aval.shape, str(aval.dtype)) for aval in program.spec.avals]
    digest = hashlib.sha256(repr(([str(node.target) for node in calls], inputs)).encode()).hexdigest()
    sources = (node.meta.get("source") for node in reversed(calls))
    source = next((s for s in sources if s is not None and s.file), None)
    return Graph(digest[:8], len(calls), source.where if source else "")


def _needed(compiled: Any) -> int:
    """Bytes on each device while an executable runs; 0 if the backend does not say."""
    try:
        found = compiled.memory_analysis()
        return int(found.argument_size_in_bytes + found.output_size_in_bytes - found.alias_size_in_bytes + found.temp_size_in_bytes)
    except Exception:
        return 0


def measure() -> Devices:
    """The devices of the hosted ranks and their memory now: by JAX's statistics, or where it keeps none (CPU) by the live arrays.

    Called on the thread that runs programs, for it holds references to arrays, and `executor` donates only those to which there are no others.
    """
    import jax

    started = time.perf_counter()
    devices = _of_ranks()
    stats = [device.memory_stats() or {} for device in devices]
    if all("bytes_in_use" in s for s in stats):
        used = tuple(int(s["bytes_in_use"]) for s in stats)
        limit = min(int(s.get("bytes_limit") or s.get("bytes_reservable_limit") or 0) for s in stats)
    else:
        live = _live_bytes()
        used, limit = tuple(live.get(device, 0) for device in devices), 0
    return Devices(used, limit, devices[0].platform, jax.device_count(), time.perf_counter() - started)


def _of_ranks() -> Sequence[Any]:
    """The devices of the hosted ranks, in their order."""
    import jax

    from torch_bridge.mesh import sharding

    if sharding.active():
        return [sharding.device_of(rank) for rank in world.current().hosted]
    return jax.devices()[:1]


def _live_bytes() -> dict[Any, int]:
    """Bytes of live arrays on each device. (Hundreds of arrays have few shardings, shapes and dtypes.)"""
    import jax

    alike: dict[Any, dict[Any, int]] = {}
    for array in jax.live_arrays():
        if not array.is_deleted():
            shapes = alike.setdefault(array.sharding, {})
            kind = array.shape, array.dtype
            shapes[kind] = shapes.get(kind, 0) + 1
    found: dict[Any, int] = {}
    for sharding, shapes in alike.items():
        each = sum(_block_bytes(sharding, shape, dtype) * count for (shape, dtype), count in shapes.items())
        for device in sharding.addressable_devices:
            found[device] = found.get(device, 0) + each
    return found


def _block_bytes(sharding: Any, shape: tuple[int, ...], dtype: Any) -> int:
    count = dtype.itemsize
    for n in sharding.shard_shape(shape):
        count *= n
    return int(count)
