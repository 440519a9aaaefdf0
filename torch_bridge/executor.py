"""Running what has been recorded: look the segment up, compile it on a miss, execute it, hand the results to their storages.

A `Trace` is a structure (list of nodes) seen before; for each set of live results and donated inputs it has one compiled program. A
buffer that only the segment still holds is donated, so an in-place update really is in place. A failed run leaves every tensor that
had a value with that value.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import sys
import threading
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
import torch
from torch import fx

from torch_bridge import _compat, dispatch, dtypes, environment, interpret, metrics, process
from torch_bridge.errors import DeadTensorError, XlaOutOfMemoryError
from torch_bridge.graph import GraphBuilder
from torch_bridge.inference import meta_of
from torch_bridge.layout import layout
from torch_bridge.segment import LOCK, Segment, Storage
from torch_bridge.source import Source

logger = logging.getLogger("torch_bridge")

MAX_IN_FLIGHT = 4
"""Executions that may be queued before recording waits for the oldest."""


class Trace:
    """A recorded structure and its compiled programs; `following` is the trace that ran after it last time."""

    def __init__(self, nodes: tuple[Any, ...], sources: Sequence[Source]):
        self.nodes = nodes
        self.sources = tuple(sources)
        self.programs: dict[tuple[int, ...], dict[tuple[bool, ...], Program]] = {}
        self.following: Trace | None = None

    def find(self, outs: tuple[int, ...], donate: tuple[bool, ...]) -> Program | None:
        """The program for these results that donates just these leaves, else one that also donates others (they are copied for it)."""
        known = self.programs.get(outs, {})
        exact = known.get(donate)
        if exact is not None:
            return exact
        return next((p for mask, p in known.items() if all(m or not d for m, d in zip(mask, donate, strict=True))), None)


class Program:
    """One compiled executable: the fx graph it came from, which leaves it takes and donates, and its jitted function."""

    def __init__(self, trace: Trace, outs: tuple[int, ...], leaves: Sequence[Any], donate: tuple[bool, ...]):
        builder = GraphBuilder(trace.nodes, trace.sources, outs)
        self.used = tuple(-v - 1 for v in builder.used_leaves)
        avals = {v: jax.ShapeDtypeStruct(leaves[-v - 1].shape, leaves[-v - 1].dtype) for v in builder.used_leaves}
        metas = {v: meta_of(layout(tuple(a.shape), None, 0, dtypes.to_torch(a.dtype))) for v, a in avals.items()}
        self.graph = builder.build(metas)
        names = [n.target for n in self.graph.nodes if n.op == "placeholder"]
        self.takes = tuple(n in names for n in ("floats", "ints", "draws"))
        self.donate = donate
        self.leaf_avals = [avals[v] for v in builder.used_leaves]
        self.donated = tuple(i for i in _usable(self.leaf_avals, donate, self.used, self.graph))
        self.jitted = jax.jit(self._apply, donate_argnums=self.donated)
        self.compiled: Any = None
        self.executions = 0
        self.compile_seconds = 0.0

    def _apply(self, *inputs: Any) -> Any:
        names = [n.target for n in self.graph.nodes if n.op == "placeholder"]
        draws = inputs[names.index("draws")] if "draws" in names else None
        return interpret.run(self.graph, inputs, interpret.draws_key_of(draws))

    def module(self) -> fx.GraphModule:
        """The graph as a `torch.fx.GraphModule`: it prints, and runs in eager torch."""
        return fx.GraphModule(torch.nn.Module(), self.graph, "Recorded")

    def arguments(self, leaves: Sequence[Any], donate: tuple[bool, ...], *extras: Any) -> list[Any]:
        """The inputs in order: the used leaves, then those of floats, ints and draws that the graph reads.

        A buffer that this program takes over but somebody else holds this time (a copy of the weights, say) is copied first.
        """
        args = [leaves[i] for i in self.used]
        if donate != self.donate:
            for i in self.donated:
                if not donate[self.used[i]]:
                    args[i] = jax.device_put(args[i], may_alias=False)
        return args + [extra() for take, extra in zip(self.takes, extras, strict=True) if take]

    def run(self, args: Sequence[Any]) -> Any:
        self.executions += 1
        with _compat.enable_x64():
            return self.compiled(*args)

    def compile(self, args: Sequence[Any]) -> None:
        started = time.perf_counter()
        with environment.compiling(self), _compat.enable_x64():
            self.lowered = self.jitted.lower(*args)
            self.compiled = self.lowered.compile()
        self.compile_seconds = time.perf_counter() - started
        metrics.COMPILE_TIME.add(self.compile_seconds)
        metrics.GRAPH_SIZE.add(len(self.graph.nodes))
        logger.debug("compiled a graph of %d nodes in %.2f s", len(self.graph.nodes), self.compile_seconds)


def _usable(avals: Sequence[Any], donate: Sequence[bool], used: Sequence[int], graph: fx.Graph) -> Iterator[int]:
    """Inputs that may be donated and whose buffer some result can take over."""
    output = next(n for n in reversed(graph.nodes) if n.op == "output")
    free: dict[tuple[Any, ...], int] = {}
    for node in output.args[0]:
        meta = node.meta["val"]
        key = (tuple(meta.shape), dtypes.to_jax(meta.dtype))
        free[key] = free.get(key, 0) + 1
    passed_through = {n for n in output.args[0] if n.op == "placeholder"}
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    for i, (aval, leaf) in enumerate(zip(avals, used, strict=True)):
        key = (tuple(aval.shape), aval.dtype)
        if donate[leaf] and free.get(key, 0) and placeholders[i] not in passed_through:
            free[key] -= 1
            yield i


MAX_TRACES = 512
"""Structures kept, with their executables; the one unused for longest goes first."""

TRACES: OrderedDict[tuple[Any, ...], Trace] = OrderedDict()
_BY_START: dict[tuple[Any, ...], Trace] = {}
RECENT: deque[Program] = deque(maxlen=16)
"""The programs that ran last, newest last."""

_in_flight: deque[weakref.ref[Any]] = deque()
_last: Trace | None = None


def clear_cache() -> None:
    """Forget every compiled program (they are compiled again when needed)."""
    global _last
    with LOCK:
        TRACES.clear()
        _BY_START.clear()
        RECENT.clear()
        _last = None
        dispatch.STATE.current.predicted = None


def sync(wait: bool = False) -> None:
    """Compile and run everything recorded so far (`xm.mark_step`); `wait` blocks until the device is done."""
    with LOCK:
        segment = dispatch.STATE.current
        if segment.nodes:
            if segment.capture:
                raise RuntimeError(
                    "a captured module asked for the value of a tensor (.item(), .cpu(), print, or a Python branch on it) while torch_bridge.capture "
                    "was recording it: captured graphs have no values. Take the value outside the module, or use torch.where."
                )
            _run(segment)
    if wait:
        wait_all()


def wait_all() -> None:
    """Block until every execution so far has finished."""
    with explained():
        for ref in list(_in_flight):
            array = ref()
            if array is not None and not array.is_deleted():
                array.block_until_ready()
    _in_flight.clear()


def materialize(storage: Storage) -> None:
    """Make sure a storage has its value (running the segment if it is pending)."""
    if storage.pending:
        sync()
    if storage.array is None and storage.segment is not None:
        raise DeadTensorError.of(storage.segment)


def _run(segment: Segment) -> None:
    process.check()
    live = segment.results()
    if not live:
        _start_next(segment, _trace_of(segment) if segment.predicted is not None else None)
        return
    trace = _trace_of(segment)
    outs = tuple(sorted(live))
    donate = tuple(sys.getrefcount(array) == 3 for array in segment.leaves)
    program = trace.find(outs, donate)
    try:
        if program is None:
            metrics.count("UncachedCompile")
            program = Program(trace, outs, segment.leaves, donate)
            trace.programs.setdefault(outs, {})[donate] = program
        else:
            metrics.count("CachedCompile")
        _execute(program, segment, live, trace, donate)
    except Exception as error:
        if program is not None and program.compiled is None:
            trace.programs[outs].pop(program.donate, None)
        _roll_back(segment, error)
        raise explain(error) from error


def _trace_of(segment: Segment) -> Trace:
    predicted = segment.predicted
    if predicted is not None and len(predicted.nodes) == len(segment.nodes):
        return predicted
    key = tuple(segment.nodes)
    trace = TRACES.get(key)
    if trace is None:
        sources = segment.sources if predicted is None else predicted.sources[: len(key)]
        trace = TRACES[key] = Trace(key, sources)
        while len(TRACES) > MAX_TRACES:
            TRACES.popitem(last=False)
    else:
        TRACES.move_to_end(key)
    _BY_START[key[0]] = trace
    return trace


def _execute(program: Program, segment: Segment, live: dict[int, list[Storage]], trace: Trace, donate: tuple[bool, ...]) -> None:
    args = program.arguments(segment.leaves, donate, *_inputs(segment))
    if program.compiled is None:
        program.compile(args)
    started = time.perf_counter()
    with uninterrupted():
        results = program.run(args)
        del args
        for vid, array in zip(sorted(live), results, strict=True):
            for storage in live[vid]:
                storage.settle(array)
        _start_next(segment, trace)
    metrics.EXECUTE_TIME.add(time.perf_counter() - started)
    RECENT.append(program)
    _in_flight.append(weakref.ref(results[0]))
    if len(_in_flight) > MAX_IN_FLIGHT:
        oldest = _in_flight.popleft()()
        if oldest is not None and not oldest.is_deleted():
            oldest.block_until_ready()


def _start_next(segment: Segment, trace: Trace | None) -> None:
    global _last
    new = Segment(by_start=_BY_START)
    if trace is not None:
        if _last is not None:
            _last.following = trace
        _last = trace
        new.predicted = trace.following
    dispatch.STATE.current = new
    segment.clear()


def _inputs(segment: Segment) -> Any:
    """Thunks for the three packed inputs."""

    def floats() -> Any:
        return np.array([v for _, values in segment.numbers for v in values if type(v) is float], dtype=np.float64)

    def ints() -> Any:
        return np.array([v for _, values in segment.numbers for v in values if type(v) is int], dtype=np.int64)

    def draws() -> Any:
        rows = [(s >> 32, s & 0xFFFFFFFF, o >> 32, o & 0xFFFFFFFF) for _, s, o in segment.draws]
        return np.array(rows, dtype=np.uint32)

    return floats, ints, draws


def _roll_back(segment: Segment, error: BaseException) -> None:
    """After a failure: storages get their last values back, pending ones are marked as lost, and recording starts afresh."""
    for ref, leaf in reversed(segment.saved):
        storage = ref()
        if storage is not None and storage.segment is segment:
            array = segment.leaves[-leaf - 1]
            if not array.is_deleted():
                storage.settle(array)
    segment.failure = f"{type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else ''}"
    dispatch.STATE.current = Segment(by_start=_BY_START)
    segment.clear()


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Hold back Ctrl-C between running a program (which consumes its donated inputs) and storing its results."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    caught: list[Any] = []
    previous = signal.getsignal(signal.SIGINT)
    if not callable(previous):
        yield
        return
    signal.signal(signal.SIGINT, lambda *args: caught.append(args))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
        if caught:
            previous(*caught[-1])


def explain(error: Exception) -> Exception:
    """The error to raise for a failed run: JAX's own, or one that says what to do."""
    text = str(error)
    if "RESOURCE_EXHAUSTED" in text or "Out of memory" in text:
        return XlaOutOfMemoryError(
            f"JAX ran out of memory on the xla device: {text.splitlines()[0]}. Use a smaller batch, activation checkpointing "
            "(torch.utils.checkpoint) or bfloat16; del tensors you no longer need and call torch_xla.sync() so that their memory is reused."
        )
    return error


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """Turn JAX's run-time errors into ours."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        raise explain(error) from error
