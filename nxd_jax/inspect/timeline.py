"""A step of a pipeline as it runs: `with inspect.pipeline(model) as step: model.run_train(...)` times each computation by itself and follows its arrays."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Iterator
from typing import Any

import jax

from nxd_jax import _wrapper
from nxd_jax.inspect.timeline_arrays import Arrays
from nxd_jax.inspect.timeline_measured import Measured
from nxd_jax.inspect.timeline_step import PipelineStep
from nxd_jax.pipeline import observers
from nxd_jax.pipeline.model import NxDPPModel
from nxd_jax.pipeline.schedules import Action
from torch_bridge import metrics
from torch_bridge.mesh import abstract_arrays, world
from torch_bridge.runtime import executor, session
from torch_bridge.runtime.observers import Observer, Phase


@contextlib.contextmanager
def pipeline(model: Any = None) -> Iterator[PipelineStep]:
    """Measure the training steps of a pipeline that run in the block.

        with inspect.pipeline(model) as step:
            model.run_train(**batch)
        print(step)

    model: an `NxDPPModel`, or what `initialize_parallel_model` made of one; None: any.

    In the block each computation (stage, kind, micro-batch) is waited for before the next one starts, so that it has the machine to itself. A step therefore
    takes longer than without; its numbers are the same. Train a step before the block, for the first one compiles. Of several steps each computation counts
    with the least time that it took; of several models, and of batches of several shapes, the last counts.

    Raises TypeError for a model without a pipeline, NotImplementedError where other processes host some of the ranks and in an abstract run.
    """
    wanted = None if model is None else _pipeline_of(model)
    if abstract_arrays.active():
        raise NotImplementedError(
            "inspect.pipeline measures computations, and an abstract run has none: inspect.schedule(model.schedule) has the plan of a step"
        )
    if not world.is_local():
        raise NotImplementedError(
            "inspect.pipeline needs all ranks in this process, and torchrun has started several processes: start the script with nxd-run, which hosts "
            "all ranks in one"
        )
    step = PipelineStep()
    with watched(Watch(wanted, step)):
        yield step


def _pipeline_of(model: Any) -> NxDPPModel:
    found = model if isinstance(model, NxDPPModel) else getattr(model, "pipeline", None) if isinstance(model, _wrapper.Wrapper) else None
    if not isinstance(found, NxDPPModel):
        raise TypeError(
            f"inspect.pipeline takes an NxDPPModel, or what initialize_parallel_model makes with pipeline_parallel_size above 1, got {type(model).__name__}"
        )
    return found


class Watch(observers.StepObserver):
    """Measures training steps of a pipeline. wanted: of which model; None: of any. step: what gets the numbers. paused: let steps run as they are."""

    counts_arrays = True

    def __init__(self, wanted: NxDPPModel | None, step: PipelineStep):
        self.wanted, self.result = wanted, step
        self.paused = False
        self.steps = 0
        self._measured: Measured | None = None
        self._arrays: Arrays | None = None

    @contextlib.contextmanager
    def step(self, model: NxDPPModel) -> Iterator[None]:
        """A training step, without Python's collector of cycles, which would count for whatever computation it happens in."""
        if self.wanted not in (None, model):
            yield
            return
        self.steps += 1
        self.result.schedule = model.schedule
        if self.paused or abstract_arrays.active() or not world.is_local():
            yield
            return
        executor.sync(wait=True)
        gc.collect()
        collects = gc.isenabled()
        compilations = metrics.COUNTERS.get("UncachedCompile", 0)
        homes = dict(zip(model.schedule.placement, model.homes, strict=True))
        self._arrays = Arrays([homes[rank] for rank in range(model.schedule.ranks)])
        self._measured = found = Measured(model.schedule)
        gc.disable()
        try:
            yield
            found.arrays = self._arrays.found
            found.compiled = metrics.COUNTERS.get("UncachedCompile", 0) - compilations
            self.result.take(found)
        finally:
            self._measured = self._arrays = None
            if collects:
                gc.enable()

    @contextlib.contextmanager
    def action(self, action: Action) -> Iterator[None]:
        """One computation, up to its results."""
        found, arrays = self._measured, self._arrays
        if found is None or arrays is None:
            yield
            return
        started, clock, here = time.perf_counter(), Clock(), session.current()
        here.observe(clock)
        try:
            yield
        finally:
            here.unobserve(clock)
        whole = time.perf_counter() - started
        found.order.append(action)
        found.seconds[action] = clock.seconds
        found.host_seconds[action] = max(whole - clock.seconds - clock.compiling, 0.0)
        jax.block_until_ready(arrays.look(len(found.order) - 1))


class Clock(Observer):
    """How long the devices work for what is recorded meanwhile: from a dispatch until its results are there. compiling: seconds of compiling."""

    def __init__(self) -> None:
        self.seconds = self.compiling = 0.0
        self._dispatched: float | None = None

    def phase(self, phase: Phase, program: Any) -> contextlib.AbstractContextManager[None]:
        """Around a phase of the session."""
        if phase == "dispatch" and self._dispatched is None:
            self._dispatched = time.perf_counter()
        return self._compile() if phase == "compile" else contextlib.nullcontext()

    @contextlib.contextmanager
    def _compile(self) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self.compiling += time.perf_counter() - started

    def executed(self, trace: Any, live: Any) -> None:
        """Wait for what was dispatched."""
        executor.wait_all()
        if self._dispatched is not None:
            self.seconds += time.perf_counter() - self._dispatched
            self._dispatched = None


@contextlib.contextmanager
def watched(watch: Watch) -> Iterator[Watch]:
    """A block in which training steps of pipelines are watched."""
    observers.observe(watch)
    try:
        yield watch
    finally:
        observers.unobserve(watch)
