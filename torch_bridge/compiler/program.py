"""A compiled program: a `ProgramSpec` with its executable."""

from __future__ import annotations

import functools
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import jax
import jax.numpy as jnp
import torch
from torch import fx

from torch_bridge import _compat, metrics
from torch_bridge.compiler import (
    background_compile,
    collective_order,
    computation,
    dump,
    equal_programs,
    executable_cache,
    garbage_collector,
    kernel_calls,
    xla_options,
)
from torch_bridge.compiler.annotated_labels import AnnotatedLabels
from torch_bridge.compiler.program_spec import Execution, ProgramSpec
from torch_bridge.config import environment, freed_memory
from torch_bridge.ir.segment import Segment
from torch_bridge.mesh import abstract_arrays, stacked_arrays
from torch_bridge.passes import scalar_inputs
from torch_bridge.precision import precision_mode
from torch_bridge.telemetry import activity

logger = logging.getLogger("torch_bridge")


class Program:
    """A spec, its executable, and what is known of its executions.

    Attributes:
        spec: what it computes and how it is called.
        jitted: its function under `jax.jit`.
        in_blocks: whether its temporaries lie in several blocks; XLA warns of each tensor that is larger than one.
        code: where its machine code lies on disk; None: nowhere.
        signature: the inputs that it was lowered for.
        held_by: weak references to the storages that its inputs came from the first time (None: from none).
        results_held_by: the same of the storages that its results went to.
        executions: how often it ran.
        step: during which step of the script it ran last, counted from 0.
        compile_seconds: what tracing, lowering and compiling took.
        facts: its graph in short, for `nxd-top`.
        cold: computes it as long as it is not compiled (`runtime.eager_programs`); None: it is compiled before it runs.
    """

    def __init__(self, spec: ProgramSpec, segment: Segment):
        self.spec = spec
        run = computation.of(spec)
        mapped = run if spec.labels is None else spec.labels.wrap(run, spec.ports)
        placing = {} if spec.labels is None else spec.labels.jit_options(spec.ports)
        options = xla_options.of(spec.graph, serialized=environment.jax_keeps_programs() or equal_programs.are_looked_for(spec.labels))
        self.in_blocks = xla_options.in_blocks(options)
        self.jitted = jax.jit(mapped, donate_argnums=spec.ports.donated, compiler_options=options, **placing)
        self._is_awaited = kernel_calls.possible(spec.graph, spec.labels, spec.mode)
        self.code: executable_cache.Code | None = None
        self.signature: Sequence[jax.ShapeDtypeStruct] = ()
        holders = {**dict(zip(segment.saved_leaves, segment.saved, strict=True)), **segment.holders}
        self.held_by = tuple(map(holders.get, spec.inputs))
        self.results_held_by: tuple[Any, ...] = ()
        self.executions = 0
        self.step = 0
        self.compile_seconds = 0.0
        self.facts: activity.Graph | None = None
        self.cold: Callable[[Sequence[Any]], list[Any]] | None = None
        self._compiled: Any = None

    @property
    def graph(self) -> fx.Graph:
        """The aten ops that it computes."""
        return self.spec.graph

    def module(self) -> fx.GraphModule:
        """The graph as a `torch.fx.GraphModule`: it prints, and runs in eager torch."""
        return fx.GraphModule(torch.nn.Module(), self.spec.graph, "Recorded")

    def arguments(self, run: Execution, passed: Mapping[int, Any]) -> list[Any]:
        """The inputs in order: leaves and values that programs before gave (`passed`, by id), then floats, ints and draws that the graph reads.

        A buffer that this program takes over but somebody else holds this time (a copy of the weights, say) is copied first.
        """
        spec = self.spec
        with _compat.enable_x64():
            args = self._stacks_and_passed(run, passed) if spec.leaf_of_port is None else self._leaves(run, spec.leaf_of_port)
        args += [run.pack(spec.slots[kind], kind) for kind in spec.kinds]
        if spec.draws:
            args.append(scalar_inputs.packed_draws((seed, offset) for _, seed, offset in run.segment.draws))
        return args + precision_mode.extra_inputs(spec.mode)

    def _leaves(self, run: Execution, leaves: Sequence[int]) -> list[Any]:
        """The leaves that come in, where each comes alone."""
        held = run.segment.leaves
        args = list(map(held.__getitem__, leaves))
        if stacked_arrays.Row in set(map(type, args)):
            args = list(map(stacked_arrays.plain, args))
        if not all(run.free) and not abstract_arrays.active():
            for at in self.spec.ports.donated:
                leaf = leaves[at]
                if not run.free[leaf] and args[at] is held[leaf]:
                    args[at] = jnp.array(args[at], copy=True)
        return args

    def _stacks_and_passed(self, run: Execution, passed: Mapping[int, Any]) -> list[Any]:
        """The same where some leaves come as stacks, or values come from programs before."""
        spec, segment, free = self.spec, run.segment, run.free
        taken = set(spec.ports.donated)
        in_eager_torch = self.cold is not None and not self.has_executable
        args: list[Any] = []
        for at, (port, stacked) in enumerate(zip(spec.ports.inputs, spec.ports.stacked_inputs, strict=True)):
            vid = spec.inputs[port[0]]
            if vid >= 0:
                args.append(stacked_arrays.plain(passed[vid]))
                continue
            leaves = [-spec.inputs[i] - 1 for i in port]
            held = segment.leaves[leaves[0]]
            found = stacked_arrays.stack(segment, leaves, on_host=in_eager_torch) if stacked else stacked_arrays.plain(held)
            if at in taken and not all(free[i] for i in leaves) and (stacked or found is held) and not abstract_arrays.active():
                found = jnp.array(found, copy=True)
            args.append(found)
        return args

    def run(self, args: Sequence[Any]) -> list[Any]:
        """Execute, with JAX's 64-bit types enabled; what comes out of each port, in the order in which they leave."""
        if self.cold is not None and not self.has_executable:
            self._called_with(args)
            return self.cold(args)
        labels = self.spec.labels
        return self.run_placed(args if labels is None else labels.placed(args, self.spec.ports.donated))

    def run_placed(self, args: Sequence[Any]) -> list[Any]:
        """The same with arguments that lie where it runs.

        One that calls kernels of torch is waited for: they take turns with the script at running Python, and could not start once Python ends.
        """
        found = list(self.compiled(*args))
        return jax.block_until_ready(found) if self._is_awaited else found

    def lowered(self) -> Any:
        """The program before XLA's optimisations, lowered anew: few ask for it, and it takes about as much memory as a small model."""
        with _compat.enable_x64():
            return self.jitted.lower(*self.signature)

    @property
    def compiled(self) -> Any:
        """Its executable, None if it was not compiled yet; one that is compiled beside the script is waited for, and a cold one is compiled."""
        if self.cold is not None and self._compiled is None and self.signature:
            self.compile(self.signature)
        return self._compiled.result() if isinstance(self._compiled, Future) else self._compiled

    @compiled.setter
    def compiled(self, executable: Any) -> None:
        self._compiled = executable

    @functools.cached_property
    def exchanges(self) -> str:
        """Stands for what it exchanges with other processes, and in which order, once it is compiled."""
        assert self.spec.labels is not None and self.spec.labels.meeting is not None
        return collective_order.word(self.spec.labels.meeting.word, self.compiled)

    @property
    def begun(self) -> bool:
        """Whether its executable is there, or on its way, or it runs without."""
        return self.has_executable or self.cold is not None

    @property
    def has_executable(self) -> bool:
        """Whether its executable is there, or on its way."""
        return self._compiled is not None

    def compile(self, args: Sequence[Any]) -> None:
        """Compile it for these arguments, and wait for it."""
        started = time.perf_counter()
        freed_memory.compiling()
        with dump.compiling(self), _compat.enable_x64():
            self.compiled = self.prepare(args)()
        self.took(time.perf_counter() - started)

    def compile_aside(self, args: Sequence[Any]) -> None:
        """Compile it for these arguments on another thread (`background_compile`)."""
        environment.prepare()
        self.compiled = background_compile.start(self, args)

    def took(self, seconds: float) -> None:
        """Take note of how long it took to compile."""
        self.compile_seconds = seconds
        freed_memory.trim_after(seconds)
        metrics.COMPILE_TIME.add(seconds)
        metrics.GRAPH_SIZE.add(len(self.spec.graph.nodes))
        metrics.ALIASED_INPUTS.add(len(self.spec.ports.donated))
        logger.debug("compiled a graph of %d nodes in %.2f s", len(self.spec.graph.nodes), seconds)

    def prepare(self, args: Sequence[Any]) -> Callable[[], Any]:
        """Trace and lower it for these arguments; what gives the executable."""
        labels = self.spec.labels
        if labels is not None:
            args = labels.placed(args)
        if not isinstance(labels, AnnotatedLabels):
            return self._lowered_for(args)
        first = self._lowered_for(labels.lowered_for(args))

        def compiled() -> Any:
            try:
                return first()
            except ValueError as error:
                if not _compat.is_indivisible(error):
                    raise
            with _compat.enable_x64():  # results lie on a mesh that the graph alone has
                return self._lowered_for(labels.lowered_for(self.signature, every=True))()

        return compiled

    def _called_with(self, args: Sequence[Any]) -> None:
        self.signature = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=None if self.spec.labels is None else a.sharding) for a in args]

    def _lowered_for(self, args: Sequence[Any]) -> Callable[[], Any]:
        self._called_with(args)
        freed_memory.used_by(sum(math.prod(a.shape) * a.dtype.itemsize for a in self.signature))
        with garbage_collector.paused():
            prepared = executable_cache.prepared(self, args)
        return _compat.without_warnings_of_xla()(prepared) if self.in_blocks else prepared
