"""A recorded structure (`Trace`) and its compiled executables (`Program`)."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import fx

from torch_bridge import _compat, metrics
from torch_bridge.compiler import background_compile, dump, executable_cache, interpret, interpret_loops, verify_programs
from torch_bridge.compiler.program_io import Ports
from torch_bridge.compiler.shard_mapping import RankLabels
from torch_bridge.config import environment
from torch_bridge.ir import dtypes
from torch_bridge.ir.graph import GraphBuilder
from torch_bridge.ir.layout import layout, meta_of
from torch_bridge.ir.segment import Segment
from torch_bridge.mesh import abstract_arrays, sharding, stacked_arrays
from torch_bridge.mesh.abstract_arrays import AbstractArray
from torch_bridge.passes import fold_repeats, scalar_inputs
from torch_bridge.passes.verify import graphs, loops, repeats, report, segments
from torch_bridge.precision import precision_mode
from torch_bridge.source import Source
from torch_bridge.telemetry import activity

logger = logging.getLogger("torch_bridge")


class Trace:
    """A structure: its nodes, where each came from, and its programs by the results they give. `following` is the trace that ran after it last time.

    used: when it ran last, on the executor's clock. evicted: it is no longer kept. agreed: lists of nodes that are known to be its own from a place on.
    """

    def __init__(self, nodes: tuple[Any, ...], sources: Sequence[Source]):
        self.nodes = nodes
        self.sources = tuple(sources)
        self.programs: dict[tuple[int, ...], list[Program]] = {}
        self.following: Trace | None = None
        self.used = 0
        self.evicted = False
        self.agreed: dict[int, list[Any]] = {}

    def find(
        self,
        outs: tuple[int, ...],
        donate: tuple[bool, ...],
        numbers: dict[type, np.ndarray],
        labels: Any = None,
        mode: precision_mode.Mode = precision_mode.PLAIN,
    ) -> Program | None:
        """A program for these results, numbers and this precision that donates just these leaves, or others too (they are copied for it)."""
        fitting = [p for p in self.programs.get(outs, ()) if p.mode == mode and p.accepts(donate, numbers, labels)]
        return next((p for p in fitting if p.takes_over(donate)), fitting[0] if fitting else None)


class Program:
    """One compiled executable: the fx graph it came from, which leaves it takes and donates, and its jitted function.

    held_by, results_held_by: weak references to the storages that the used leaves came from (None: from none) and that the results went to, the first time.
    executions: how often it ran; step: during which step of the script it ran last, counted from 0.
    """

    def __init__(
        self,
        trace: Trace,
        outs: tuple[int, ...],
        segment: Segment,
        donate: tuple[bool, ...],
        labels: Any = None,
        mode: precision_mode.Mode = precision_mode.PLAIN,
    ):
        self.mode = mode
        self.slots: dict[type, scalar_inputs.Slots] = scalar_inputs.share(
            trace.nodes, trace.sources, segment.numbers, [p.slots for p in trace.programs.get(outs, ())]
        )
        builder = GraphBuilder(trace.nodes, trace.sources, outs)
        self.used = tuple(-v - 1 for v in builder.used_leaves)
        holders = {**{leaf: ref for ref, leaf in segment.saved}, **segment.holders}
        self.held_by = tuple(holders.get(v) for v in builder.used_leaves)
        self.results_held_by: tuple[Any, ...] = ()
        self.step = 0
        avals = {v: local_aval(segment, -v - 1) for v in builder.used_leaves}
        metas = {v: meta_of(layout(tuple(a.shape), None, 0, dtypes.to_torch(a.dtype))) for v, a in avals.items()}
        self.graph = builder.build(metas, slots=self.slots)
        if report.ON:
            segments.check_slots(segment, trace.nodes, self.slots)
            graphs.check(self.graph, trace.nodes, outs, metas, self.slots)
        names = [n.target for n in self.graph.nodes if n.op == "placeholder"]
        self.takes_kinds = [kind for kind, name in ((float, "floats"), (int, "ints")) if name in names]
        self.takes_draws = "draws" in names
        self.donate = donate
        self.leaf_avals = [avals[v] for v in builder.used_leaves]
        self.ranks = None if labels is None else RankLabels(self, segment, outs, labels)
        updates = self._new_values(_updates(segment), outs)
        self.plan = self._fold(updates)
        stacks = ((), ()) if self.plan is None else (self.plan.stacked_inputs(), [tuple(members) for _, members in self.plan.stacked])
        self.ports = Ports.of(len(self.used), len(outs), *stacks)
        self.ports.pair(updates)
        if report.ON:
            verify_programs.check(self, segment, outs)
        run = self._apply if self.ranks is None else self.ranks.wrap(self._apply, self.ports)
        self.jitted = jax.jit(run, donate_argnums=self.ports.donated)
        self._compiled: Any = None
        self.executions = 0
        self.compile_seconds = 0.0
        self.facts: activity.Graph | None = None

    def _apply(self, *inputs: Any) -> Any:
        results = precision_mode.apply(self.mode, self._evaluate, inputs)
        if report.ON:
            verify_programs.check_results(self, results, "rewrite_roundings")
        return results

    def _evaluate(self, *inputs: Any) -> Any:
        placeholders = [n for n in self.graph.nodes if n.op == "placeholder"]
        ports = self.ports
        values: dict[fx.Node, Any] = dict(zip(placeholders[len(self.used) :], inputs[len(ports.inputs) :], strict=False))
        draws = next((x for n, x in values.items() if n.target == "draws"), None)
        if self.plan is not None:
            given = self.plan.given()
            alone = ports.inputs[len(given) :]
            values.update((placeholders[i], x) for (i,), x in zip(alone, inputs[len(given) :], strict=False))
            single, stacked = interpret_loops.Evaluation(self.plan, self.graph, values, dict(zip(given, inputs, strict=False)), draws).run()
            outs = [*stacked, *single]
        else:
            outs = interpret.run(self.graph, inputs, interpret.draws_key_of(draws), store=precision_mode.store(self.mode))
        results = tuple(outs[at] for at in ports.order)
        if report.ON:
            verify_programs.check_results(self, results, "interpret" if self.plan is None else "interpret_loops")
        return results

    def _fold(self, updates: dict[int, int]) -> fold_repeats.Plan | None:
        """How to compute it as loops over repeated layers, if there are enough of them."""
        least = fold_repeats.least()
        runs = fold_repeats.runs(self.graph, least) if least and self.mode == precision_mode.PLAIN else []
        if not runs:
            return None
        if report.ON:
            repeats.check(self.graph, runs)
        labels = self.ranks
        metas = [(tuple(n.meta["val"].shape), n.meta["val"].dtype) for n in self._outputs()]

        def inputs_alike(places: Sequence[int]) -> bool:
            if any(i >= len(self.used) for i in places):
                return False
            return labels is None or all(labels.inputs[i] == labels.inputs[places[0]] for i in places)

        def results_alike(places: Sequence[int]) -> bool:
            same = all(metas[k] == metas[places[0]] for k in places)
            return same and (labels is None or all(labels.outputs[k] == labels.outputs[places[0]] for k in places))

        plan = fold_repeats.Plan(self.graph, runs, updates, inputs_alike, results_alike)
        if report.ON:
            loops.check(plan, self.graph)
        return plan

    def _new_values(self, updates: dict[int, int], outs: tuple[int, ...]) -> dict[int, int]:
        """For used leaves that may be taken over: the result that is the new value, and lies as the old one does."""
        metas = [node.meta["val"] for node in self._outputs()]
        place = {vid: k for k, vid in enumerate(outs)}
        found: dict[int, int] = {}
        for i, leaf in enumerate(self.used):
            k = place.get(updates.get(leaf, -1), -1) if self.donate[leaf] else -1
            if k < 0 or k in found.values():
                continue
            aval = self.leaf_avals[i]
            same_label = self.ranks is None or self.ranks.inputs[i] == self.ranks.outputs[k]
            if same_label and (tuple(metas[k].shape), dtypes.to_jax(metas[k].dtype)) == (tuple(aval.shape), aval.dtype):
                found[i] = k
        return found

    def _outputs(self) -> Sequence[fx.Node]:
        """The nodes of the graph's results."""
        output = next(n for n in reversed(self.graph.nodes) if n.op == "output")
        return output.args[0]

    def module(self) -> fx.GraphModule:
        """The graph as a `torch.fx.GraphModule`: it prints, and runs in eager torch."""
        return fx.GraphModule(torch.nn.Module(), self.graph, "Recorded")

    def accepts(self, donate: tuple[bool, ...], numbers: dict[type, np.ndarray], labels: Any = None) -> bool:
        """Whether it can run for leaves that may be donated as told (it may want more, not less), these numbers and these labels."""
        if self.ranks is not None and not self.ranks.fit(labels, self.used):
            return False
        if any(donate[i] and not self.donate[i] for i in self.used):
            return False
        return all(self.slots[kind].pack(numbers[kind]) is not None for kind in self.takes_kinds)

    def takes_over(self, donate: tuple[bool, ...]) -> bool:
        """Whether it donates exactly what may be donated."""
        return all(donate[i] == self.donate[i] for i in self.used)

    def arguments(self, segment: Segment, donate: tuple[bool, ...], numbers: dict[type, np.ndarray]) -> list[Any]:
        """The inputs in order: the used leaves, then those of floats, ints and draws that the graph reads.

        A buffer that this program takes over but somebody else holds this time (a copy of the weights, say) is copied first.
        """
        taken = set(self.ports.donated)
        args: list[Any] = []
        with _compat.enable_x64():
            for at, (port, stacked) in enumerate(zip(self.ports.inputs, self.ports.stacked_inputs, strict=True)):
                leaves = [self.used[i] for i in port]
                held = segment.leaves[leaves[0]]
                found = stacked_arrays.stack(segment, leaves) if stacked else stacked_arrays.plain(held)
                if at in taken and not all(donate[i] for i in leaves) and (stacked or found is held) and not abstract_arrays.active():
                    found = jnp.array(found, copy=True)
                args.append(found)
        args += [self.slots[kind].pack(numbers[kind]) for kind in self.takes_kinds]
        if self.takes_draws:
            seeds = [(s >> 32, s & 0xFFFFFFFF, o >> 32, o & 0xFFFFFFFF) for _, s, o in segment.draws]
            args.append(np.array(seeds, dtype=np.uint32))
        return args + precision_mode.extra_inputs(self.mode)

    def run(self, args: Sequence[Any]) -> list[Any]:
        """Execute, with JAX's 64-bit types enabled; what comes out of each port, in the order in which they leave."""
        return list(self.compiled(*(args if self.ranks is None else self.ranks.placed(args))))

    def abstract_results(self) -> list[AbstractArray]:
        """What comes out of each port, in the order in which they leave: shapes and places, from the graph alone."""
        metas = [node.meta["val"] for node in self._outputs()]
        shapes = [tuple(m.shape) for m in metas]
        ports = self.ports
        if self.ranks is not None:
            shapes = [sharding.global_shape(shape, spec) for shape, spec in zip(shapes, self.ranks.outputs, strict=True)]
            places = [sharding.sharding(spec) for spec in ports.output_specs(self.ranks.outputs)]
        else:
            places = [abstract_arrays.everywhere()] * len(ports.order)
        made = []
        for at, place in zip(ports.order, places, strict=True):
            first = ports.outputs[at][0]
            rows = (len(ports.outputs[at]),) if ports.stacked_outputs[at] else ()
            made.append(AbstractArray((*rows, *shapes[first]), dtypes.to_jax(metas[first].dtype), place))
        return made

    def lowered(self) -> Any:
        """The program before XLA's optimisations, lowered anew: few ask for it, and it takes about as much memory as a small model."""
        with _compat.enable_x64():
            return self.jitted.lower(*self.signature)

    @property
    def compiled(self) -> Any:
        """Its executable, None if it was not compiled yet; one that is compiled beside the script is waited for."""
        return self._compiled.result() if isinstance(self._compiled, Future) else self._compiled

    @compiled.setter
    def compiled(self, executable: Any) -> None:
        self._compiled = executable

    @property
    def begun(self) -> bool:
        """Whether its executable is there, or on its way."""
        return self._compiled is not None

    def compile(self, args: Sequence[Any]) -> None:
        """Compile it for these arguments, and wait for it."""
        started = time.perf_counter()
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
        metrics.COMPILE_TIME.add(seconds)
        metrics.GRAPH_SIZE.add(len(self.graph.nodes))
        logger.debug("compiled a graph of %d nodes in %.2f s", len(self.graph.nodes), seconds)

    def prepare(self, args: Sequence[Any]) -> Callable[[], Any]:
        """Trace and lower it for these arguments; what gives the executable."""
        if self.ranks is not None:
            args = self.ranks.placed(args)
        self.signature = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=None if self.ranks is None else a.sharding) for a in args]
        return executable_cache.prepared(self, args)


def local_aval(segment: Segment, leaf: int) -> jax.ShapeDtypeStruct:
    """Shape and dtype that each rank sees of a leaf."""
    array = segment.leaves[leaf]
    shape = tuple(array.shape)
    if sharding.active() and hasattr(array, "sharding"):
        shape = () if id(array) in segment.scalars else array.sharding.shard_shape(array.shape)
    return jax.ShapeDtypeStruct(shape, array.dtype)


def _updates(segment: Segment) -> dict[int, int]:
    """Leaves (by position) whose storage gets a new value in this segment, and the id of that value."""
    found: dict[int, int] = {}
    for ref, leaf in segment.saved:
        storage = ref()
        if storage is not None and storage.segment is segment and storage.vid >= 0:
            found.setdefault(-leaf - 1, storage.vid)
    return found
