"""Running what has been recorded: look the segment up, compile it on a miss, execute it, hand the results to their storages.

A `Trace` is a structure (list of nodes) seen before. For each set of live results it is cut into parts, by default one (`passes.cut_segment`), and has a
compiled program for each. A buffer that only the segment still holds is donated, so an in-place update really is in place. A run that cannot be compiled
leaves every tensor that had a value with that value. So does one that fails on the devices, but for buffers that were taken over before it failed.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import repeat
from operator import eq
from typing import Any

import jax
from torch import fx

from torch_bridge import _compat, metrics
from torch_bridge.compiler import annotated_labels, background_compile, shard_mapping
from torch_bridge.compiler.annotated_labels import AnnotatedSegment
from torch_bridge.compiler.program import Program
from torch_bridge.compiler.program_spec import Execution, specify
from torch_bridge.compiler.shard_mapping import SegmentLabels
from torch_bridge.compiler.trace import Trace
from torch_bridge.config import fork_guard, freed_memory, memory_maps
from torch_bridge.config.settings import SETTINGS
from torch_bridge.errors import DeadTensorError, VerificationError, XlaOutOfMemoryError
from torch_bridge.identity import ONCE, references
from torch_bridge.ir.segment import LOCK, Results, Segment, Storage
from torch_bridge.mesh import places, processes, sharding, spmd, together, watch, world
from torch_bridge.mesh.places import HERE, Place
from torch_bridge.passes import automatic_dynamic, hoist_constants, manual_regions, scalar_inputs
from torch_bridge.passes.verify import segments
from torch_bridge.passes.verify.meaning import Meaning
from torch_bridge.precision import precision_mode
from torch_bridge.runtime import cold_shapes, interrupts, speculation
from torch_bridge.runtime.observers import around
from torch_bridge.runtime.session import STATE, Session, activated, sessions
from torch_bridge.telemetry import activity, compile_log

logger = logging.getLogger("torch_bridge")


def _before_ranks_change() -> None:
    """What is recorded runs on the old mesh; compiled programs belong to it."""
    with LOCK:
        for session in sessions():
            if not session.current.capture:
                with activated(session):
                    sync()
                    for deferred in list(session.deferred):
                        deferred.run()
                    clear_cache()
                    session.begin()  # what is left has no nodes, but storages may be adopted in it as they lie among these ranks


world.before_change(_before_ranks_change)


class AskedForValueError(RuntimeError):
    """What is recorded without values asked for one."""


def clear_cache() -> None:
    """Forget every compiled program of this thread's session (they are compiled again when needed), and how many there were of each structure."""
    session = STATE.session
    with LOCK:
        session.traces.clear()
        session.alike.clear()
        session.by_start.clear()
        session.recent.clear()
        session.hoisted.clear()
        session.kinds.clear()
        session.cold_shapes = cold_shapes.ColdShapes()
        session.last = None
        session.current.unpredict()


def sync(wait: bool = False) -> None:
    """Compile and run everything recorded so far (`xm.mark_step`); `wait` blocks until the device is done."""
    with LOCK:
        session = STATE.session
        segment = session.current
        if segment.nodes:
            if segment.capture:
                raise AskedForValueError(
                    "a captured module asked for the value of a tensor (.item(), .cpu(), print, or a Python branch on it) while torch_bridge.capture "
                    "was recording it: captured graphs have no values. Take the value outside the module, or use torch.where."
                )
            _run(session)
    if wait:
        wait_all()


class Deferred:
    """Programs of a segment that are to run later: when `run` is called, or somebody needs a value of theirs."""

    def __init__(self, session: Session, trace: Trace, programs: list[Program], run: Execution, live: Results):
        self.session = session
        self.trace = trace
        self.programs = programs
        self.execution = run
        self.live = live
        self.passed: dict[int, Any] = {}
        run.segment.deferred = self
        session.deferred.add(self)

    def run(self) -> None:
        """Run them, unless they have run. Buffers that only they still need are let go of."""
        segment = self.execution.segment
        with LOCK, activated(self.session), interrupts.deferred():  # once taken off the books it runs
            if segment.deferred is not self:
                return
            segment.deferred = None
            self.session.deferred.discard(self)
            try:
                with around(self.session.observers, "prepare"):
                    for program in self.programs:
                        args = program.arguments(self.execution, self.passed)
                        _note(self.session, program, self.execution, args, self.live)
                        _run_program(self.session, program, args, self.live, self.passed)
            except Exception as error:
                activity.ACTIVITY.dispatching = False
                _restore(segment)
                segment.failure = _short(error)
                raise explain(error) from error
            finally:
                self.passed.clear()
                segment.clear()
        for observer in self.session.observers:
            observer.executed(self.trace, self.live)
        self.live = Results({})


def sync_first(storages: Iterable[Storage]) -> Deferred | None:
    """Run of what is recorded only what these storages wait for. The rest, None if there is none, runs when its `run` is called or a value of it is needed."""
    with LOCK:
        session = STATE.session
        segment = session.current
        wanted = frozenset(s.vid for s in storages if s.segment is segment and s.vid >= 0)
        if segment.capture or not segment.nodes:
            sync()
            return None
        with around(session.observers, "prepare"):
            return _run_pending(session, segment, wanted)


def wait_all() -> None:
    """Block until every execution so far has finished."""
    session = STATE.session
    with explained(), around(session.observers, "wait"):
        session.in_flight.wait()


def materialize(storage: Storage) -> None:
    """Make sure a storage has its value (running the segment if it is pending)."""
    session = STATE.session
    session.current.asked()
    if storage.pending and storage.segment.known is not None and storage.segment.known(storage):
        return
    if storage.pending:
        owner = getattr(storage.segment, "owner", None)
        if storage.segment.deferred is not None:
            storage.segment.deferred.run()
        elif owner is None or owner is session:
            sync()
        else:
            with LOCK:
                owner.finish(storage.segment)
    if storage.held is None and storage.segment is not None:
        raise DeadTensorError.of(storage.segment)


def _run(session: Session) -> None:
    with around(session.observers, "prepare"):
        _run_pending(session, session.current)


Session.run = _run


def _run_pending(session: Session, segment: Segment, first: frozenset[int] | None = None) -> Deferred | None:
    """Run what is recorded. first: values that are needed at once; what the others need alone comes back as what is to run later."""
    fork_guard.check()
    for observer in session.observers:
        observer.preparing(segment)
    mode = precision_mode.current()
    trace = _predicted(segment)
    speculation.keep_for(session, trace)
    if trace is None:
        segment.unpredict()
        _hoist(session, segment)
    live = segment.results()
    try:
        manual_regions.drop(segment, live)
    except RuntimeError as error:
        _roll_back(session, segment, error)
        raise
    if not live:
        _start_next(session, trace)
        return None
    trace = trace or _lookup(session, segment)
    trace.used = next(session.clock)
    programs: list[Program] = []
    try:
        labels = _labels(segment, live)
        numbers: dict[type, Any] = {kind: scalar_inputs.flat(segment.numbers, kind) for kind in (float, int)}
        run = Execution(segment, _free(segment), numbers, labels, mode)
        now = None if first is None else tuple(sorted(first & live.keys()))
        for program in _programs(session, trace, run, live, now):
            programs.append(program)
        deferred = _execute(session, trace, programs, run, live)
    except BaseException as error:
        activity.ACTIVITY.dispatching = False
        for program in programs:
            if not program.begun and program in trace.programs.get(program.spec.part, ()):
                trace.programs[program.spec.part].remove(program)  # JAX does not lower a function again whose lowering was interrupted
        if not isinstance(error, Exception):
            raise
        _roll_back(session, segment, error)
        raise explain(error) from error
    for observer in session.observers:
        observer.executed(trace, live if deferred is None else live.only(v for v in live if v not in deferred.live))
    return deferred


def _labels(segment: Segment, live: Results) -> SegmentLabels | AnnotatedSegment | None:
    """How a segment lies: among the ranks, on the mesh of annotated programs, or (None) on one device."""
    if sharding.active():
        return shard_mapping.of(segment, live)
    return annotated_labels.of(segment, live) if spmd.active() else None


def _free(segment: Segment) -> tuple[bool, ...]:
    """By leaf, whether nobody but the segment holds its array."""
    return tuple(map(eq, references(segment.leaves), repeat(ONCE))) if SETTINGS.donate else (False,) * len(segment.leaves)


def _programs(session: Session, trace: Trace, run: Execution, live: Results, first: tuple[int, ...] | None) -> Iterator[Program]:
    """The programs that compute what storages wait for, in order; those that are missing are made, and not compiled yet."""
    parts = trace.cut(tuple(sorted(live)), *_placed(session, run.segment), first=first)
    for part in parts:
        program = trace.find(part, run)
        if program is None:
            metrics.count("UncachedCompile")
            if session.abstract is None and memory_maps.MAPS.are_scarce():
                _make_room(trace)
            program = Program(specify(trace, part, run), run.segment)
            trace.programs.setdefault(part, []).append(program)
            if len(parts) == 1 and session.abstract is None and session.cold_shapes.look(program, trace):
                for late in cold_shapes.too_many(session.traces.values()):
                    _evict(session, late)
            session.history.compiling(program, trace, run, every_shape=not cold_shapes.possible(program.spec))
            program.results_held_by = tuple(live.one[vid].ref if vid in live else None for vid in part.results)
        else:
            metrics.count("CachedCompile")
        yield program
        if part is not parts[-1]:
            run.passed.update(program.spec.passes())


def _placed(session: Session, segment: Segment) -> tuple[tuple[Place, ...], tuple[Place | None, ...], Place]:
    """Where the nodes of a segment run, if the session says so; where its leaves lie, if that matters; and where nodes run that these say nothing of."""
    if session.placement is not None:
        return tuple(session.placement(segment)), (), HERE
    if not places.in_use():
        return (), (), HERE
    lying = places.of_all(segment.leaves)
    home = segment.home or HERE
    return (), lying if any(lying) or home is not HERE else (), home


def _hoist(session: Session, segment: Segment) -> None:
    """Constants of a segment that has not been predicted become inputs."""
    try:
        if SETTINGS.verify:
            segments.check(segment, "recording")
        before = Meaning(segment) if SETTINGS.verify and segment.fills else None
        with interrupts.deferred():  # half a rewrite would be a wrong graph
            hoist_constants.hoist(segment, session.hoisted)
        if before is not None:
            segments.check(segment, "hoist_constants")
            before.check(segment, "hoist_constants")
    except VerificationError as error:
        _roll_back(session, segment, error)
        raise


def _predicted(segment: Segment) -> Trace | None:
    """The trace that recording agreed with from the first node to the last."""
    predicted = segment.predicted
    return predicted if predicted is not None and not predicted.evicted and len(predicted.nodes) == len(segment.nodes) else None


def _lookup(session: Session, segment: Segment) -> Trace:
    """The trace with this structure, made if it is new."""
    automatic_dynamic.apply(segment)
    key = tuple(segment.nodes)
    traces = session.traces
    trace = traces.get(key)
    if trace is None and _has_other_numbers(session, segment):
        key = tuple(segment.nodes)
        trace = traces.get(key)
    if trace is None:
        trace = traces[key] = Trace(key, segment.sources)
        alike = automatic_dynamic.signature(key)
        if alike is not None:
            session.alike[alike] = trace
        while len(traces) > SETTINGS.max_traces:
            _evict(session, min((t for t in traces.values() if t is not trace), key=lambda t: t.used))
    if key:
        session.by_start[key[0]] = trace
    return trace


def _has_other_numbers(session: Session, segment: Segment) -> bool:
    """Whether a segment is one that ran before but for numbers which were constants: they are inputs from now on."""
    alike = automatic_dynamic.signature(segment.nodes)
    before = None if alike is None else session.alike.get(alike)
    return before is not None and automatic_dynamic.learn(segment, before.nodes, before.sources) and automatic_dynamic.apply(segment)


def _make_room(trace: Trace) -> None:
    """Let go of the half of all traces, but for this one, that were unused for longest: their machine code holds memory mappings."""
    before = str(memory_maps.MAPS)
    for session in sessions():
        others = sorted((t for t in session.traces.values() if t is not trace), key=lambda t: t.used)
        for old in others[: (len(others) + 1) // 2]:
            gone = {program for programs in old.programs.values() for program in programs}
            _evict(session, old)
            kept = [program for program in session.recent if program not in gone]
            session.recent.clear()
            session.recent.extend(kept)
    gc.collect()
    logger.warning(
        "compiled programs that were unused for longest are let go of, and compiled again if they come back: this process had %s, now it has %s, and XLA ends "
        "a process that gets no more. Fewer shapes make fewer programs; `sysctl -w vm.max_map_count=262144` allows more.",
        before,
        memory_maps.MAPS,
    )


def _evict(session: Session, trace: Trace) -> None:
    """Let go of a trace and its executables."""
    del session.traces[trace.nodes]
    alike = automatic_dynamic.signature(trace.nodes)
    if alike is not None and session.alike.get(alike) is trace:
        del session.alike[alike]
    trace.evicted = True
    trace.forecast = None
    trace.programs.clear()
    if session.by_start.get(trace.nodes[0]) is trace:
        del session.by_start[trace.nodes[0]]


def _execute(session: Session, trace: Trace, programs: list[Program], run: Execution, live: Results) -> Deferred | None:
    """Compile what is not compiled yet, then run the programs one after the other: a program that cannot be compiled leaves all values as they were.

    Late ones do not run now.
    """
    late = [program for program in programs if program.spec.part.late]
    deferred = None
    args = programs[0].arguments(run, {})
    _compile(session, programs, run, args)
    passed: dict[int, Any] = {}
    speculation.learn(session, trace, programs, run)
    with interrupts.deferred():  # running consumes donated inputs: its results must reach their storages
        for program in programs[: len(programs) - len(late)]:
            if program is not programs[0]:
                args = program.arguments(run, passed)
            _note(session, program, run, args, live)
            _run_program(session, program, args, live, passed if len(programs) > 1 else None)
        if late:
            results = {v for program in late for v in program.spec.results}
            deferred = Deferred(session, trace, late, run, live.only(results))
            needed = {v for program in late for v in program.spec.inputs}
            deferred.passed.update((v, held) for v, held in passed.items() if v in needed)
        passed.clear()
        _start_next(session, trace)
    _await_flight(session)
    return deferred


def _compile(session: Session, programs: list[Program], run: Execution, args: list[Any]) -> None:
    """Compile the programs that are not compiled yet. args: the arguments of the first; later ones are compiled for what those before will give."""
    if all(map(cold_shapes.is_ready, programs)):
        return
    passed: dict[int, Any] = {}
    for program in programs:
        if not cold_shapes.is_ready(program) and session.abstract is None and not compile_log.only_noted(program):
            given = args if program is programs[0] else program.arguments(run, passed)
            if background_compile.wanted():
                program.compile_aside(given)
            else:
                _compile_now(session, program, given)
        if program is not programs[-1]:
            passed.update(zip(program.spec.results, program.spec.ports.results(program.spec.abstract_results()), strict=True))


def _compile_now(session: Session, program: Program, args: Sequence[Any]) -> None:
    with activity.compiling(program), around(session.observers, "compile", program):
        program.compile(args)


_ALONE = contextlib.nullcontext()


def _run_program(session: Session, program: Program, args: list[Any], live: Results, passed: dict[int, Any] | None) -> None:
    """Hand a program to the devices, and its results to the storages that wait for them and to the programs after it."""
    _settle(program, live, _handed_over(session, program, args), passed)


def _handed_over(session: Session, program: Program, args: list[Any], placed: bool = False) -> list[Any]:
    """Hand a program to the devices: what storages hold of its results. placed: the arguments lie where it runs."""
    meeting = None if program.spec.labels is None else program.spec.labels.meeting
    with _ALONE if meeting is None else together.running(meeting.among, program.exchanges):
        if meeting is not None and not program.executions:
            processes.meet(meeting, program.exchanges)
        if program.executions == 1:  # what compiling it and its first execution took is free by now
            freed_memory.settle()
        elif program.executions:
            freed_memory.ran()
        started = time.perf_counter()
        activity.ACTIVITY.dispatching = True
        arrays = _dispatched(session, program, args, placed)
    args.clear()
    found = program.spec.ports.results(arrays)
    activity.ACTIVITY.ran(program.facts, arrays[-1])
    took = time.perf_counter() - started
    metrics.EXECUTE_TIME.add(took)
    if spmd.active():
        metrics.EXECUTE_REPLICATED.add(took)
        metrics.count("ExecuteReplicated")
    program.step = activity.ACTIVITY.steps
    session.recent.append(program)
    session.in_flight.add(program.spec.part.place, arrays[0])
    arrays.clear()  # whoever keeps this frame (an exception that was caught while compiling) would keep the next run from donating them
    return found


def _note(session: Session, program: Program, run: Execution, args: Sequence[Any], live: Results) -> None:
    """Tell who wants to run it again by itself (`rerun`)."""
    if session.noting is not None:
        session.noting(program, run, args, live)


def run_again(program: Program, args: list[Any], placed: bool = False) -> list[Any]:
    """Run a program that has run, outside of a segment: what storages hold of its results, in their order; `settle` gives it to them.

    placed: the arguments lie where it runs.
    """
    session = STATE.session
    metrics.count("CachedCompile")
    try:
        if not cold_shapes.is_ready(program):
            _compile_now(session, program, args)
        found = _handed_over(session, program, args, placed)
    except Exception as error:
        activity.ACTIVITY.dispatching = False
        raise explain(error) from error
    _await_flight(session)
    return found


def _await_flight(session: Session) -> None:
    """Until no more than the allowed number of executions has not finished, wherever they run."""
    limit = SETTINGS.max_in_flight
    if session.in_flight.over(limit):
        with around(session.observers, "wait"):
            session.in_flight.wait(limit)


def _dispatched(session: Session, program: Program, args: list[Any], placed: bool) -> list[Any]:
    """Hand a program to the devices; its results. An abstract run makes them of shapes alone, and extracting graphs of zeros. placed: see `run_again`."""
    program.executions += 1
    with around(session.observers, "dispatch", program), _compat.enable_x64():
        if session.abstract is not None:
            return list(session.abstract.results(program, args))
        if SETTINGS.extract_only:
            return compile_log.zeros(program)
        early = speculation.taken(session, program, args)
        if early is not None:
            return early
        if program.cold is None or program.has_executable:
            return program.run_placed(args) if placed and program.has_executable else program.run(args)
    return _run_cold(session, program, args)


def _run_cold(session: Session, program: Program, args: list[Any]) -> list[Any]:
    """Run a program that is not compiled; compile it, if that fails (eager torch refuses an index out of range, say)."""
    with _compat.enable_x64():
        try:
            return program.run(args)
        except Exception as error:
            logger.debug("a program that was to run in eager torch is compiled: %s: %s", type(error).__name__, error)
        program.cold = None
        _compile_now(session, program, args)
        return program.run(args)


def _settle(program: Program, live: Results, found: list[Any], passed: dict[int, Any] | None) -> None:
    """Give the results to the storages that wait for them, and note what later programs may take."""
    if passed is not None:
        passed.update(zip(program.spec.results, found, strict=True))
    live.settle(program.spec.results, found)


def _start_next(session: Session, trace: Trace | None) -> None:
    new = session.begin()
    if trace is not None:
        if session.last is not None:
            session.last.following = trace
        session.last = trace
        new.predicted = trace.following
        speculation.expect(session, new, new.predicted)


def _roll_back(session: Session, segment: Segment, error: BaseException) -> None:
    """After a failure: storages get their last values back, pending ones are marked as lost, and recording starts afresh."""
    with contextlib.suppress(*([LookupError] if isinstance(error, VerificationError) else [])):  # its lists may be what is wrong
        _restore(segment)
    segment.failure = _short(error)
    session.begin()


def _short(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else ''}"


def _restore(segment: Segment) -> None:
    """Storages get the values that they had before the segment."""
    for ref, leaf in reversed(list(segment.saved_with_leaves())):
        storage = ref()
        if storage is not None and storage.segment is segment:
            array = segment.leaves[-leaf - 1]
            if not array.is_deleted():
                storage.settle(array)
    for ref, array in segment.overwritten:
        storage = ref()
        if storage is not None and storage.segment is segment:
            storage.settle(array)


def explain(error: Exception) -> Exception:
    """The error to raise for a failed run: JAX's own, or one that says what to do."""
    text = str(error)
    if "RESOURCE_EXHAUSTED" in text or "Out of memory" in text:
        return XlaOutOfMemoryError(
            f"JAX ran out of memory on the xla device: {text.splitlines()[0]}. Use a smaller batch, activation checkpointing "
            "(torch.utils.checkpoint) or bfloat16; del tensors you no longer need and call torch_xla.sync() so that their memory is reused."
        )
    return watch.explain(error) or error


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """Turn JAX's run-time errors into ours."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        raise explain(error) from error


def last_graphs() -> list[fx.Graph]:
    """The graphs of aten ops of the programs that ran last, each once, in the order of their last runs (16 runs back at most)."""
    programs = list(dict.fromkeys(reversed(STATE.session.recent)))
    return [program.graph for program in reversed(programs)]
