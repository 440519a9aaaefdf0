"""What a program computes, of which values, and how it is called: all that compiling it depends on, as one frozen `ProgramSpec`.

`specify` makes it for a part of a segment that is about to run (`Execution`). `Program` is a spec with its executable.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np
from jax.sharding import PartitionSpec
from torch import fx

from torch_bridge.compiler import kept_inputs, shard_mapping, verify_programs
from torch_bridge.compiler.annotated_labels import AnnotatedLabels, AnnotatedSegment
from torch_bridge.compiler.program_io import Ports
from torch_bridge.compiler.shard_mapping import RankLabels, SegmentLabels
from torch_bridge.config.settings import SETTINGS
from torch_bridge.ir import dtypes
from torch_bridge.ir.graph import GraphBuilder, results_of
from torch_bridge.ir.layout import contiguous_meta
from torch_bridge.ir.segment import Segment
from torch_bridge.mesh import abstract_arrays, places, sharding, spmd
from torch_bridge.mesh.abstract_arrays import AbstractArray
from torch_bridge.mesh.spmd_mode import MODE
from torch_bridge.passes import even_results, fold_repeats, manual_regions, scalar_inputs, step_products, time_steps
from torch_bridge.passes.cut_segment import Part
from torch_bridge.passes.scalar_inputs import Slots
from torch_bridge.passes.verify import graphs, loops, repeats, segments
from torch_bridge.precision import precision_mode
from torch_bridge.precision.precision_mode import Mode

if TYPE_CHECKING:
    from torch_bridge.compiler.trace import Trace


class Passed(NamedTuple):
    """A value that a part computes for later ones: its shape and dtype as a rank sees it, and its label (None without ranks)."""

    aval: jax.ShapeDtypeStruct
    label: PartitionSpec | None


@dataclass(frozen=True, eq=False)
class Execution:
    """A segment that is about to run: what its programs have to fit.

    Attributes:
        segment: what was recorded.
        free: by leaf, whether nobody but the segment holds its array, so that a program may take it over.
        numbers: the lifted Python numbers, by type.
        labels: how leaves lie among the ranks, or on the mesh of annotated programs, and results are to lie; None on one device.
        mode: the precision that the environment asks for.
        passed: values of parts before, by id.
        packed: what `ProgramSpec.accepts` has packed of the numbers, by slots.
    """

    segment: Segment
    free: tuple[bool, ...]
    numbers: dict[type, np.ndarray]
    labels: SegmentLabels | AnnotatedSegment | None = None
    mode: Mode = precision_mode.PLAIN
    passed: dict[int, Passed] = field(default_factory=dict)
    packed: dict[Slots, np.ndarray] = field(default_factory=dict)

    def pack(self, slots: Slots, kind: type) -> np.ndarray | None:
        """The numbers of a type as a program with these slots takes them, None if they do not fit."""
        found = self.packed.get(slots)
        if found is None and (found := slots.pack(self.numbers[kind])) is not None:
            self.packed[slots] = found
        return found

    def aval(self, vid: int) -> jax.ShapeDtypeStruct:
        """Shape and dtype that each rank sees of a leaf or of a value of an earlier part."""
        return local_aval(self.segment, -vid - 1) if vid < 0 else self.passed[vid].aval


@dataclass(frozen=True, eq=False)
class ProgramSpec:
    """What one program computes, and how it is called.

    Attributes:
        part: the part of its segment that it computes.
        graph: the aten ops. Its placeholders are `inputs`, then floats, ints and draws, those that it reads.
        inputs: ids of the values that it takes: leaves (below 0), then results of parts before.
        results: ids of the values that it gives, in the order of the graph's results.
        avals: by input, shape and dtype as each rank sees it.
        owned: by input, whether nobody else held its buffer, so that the program may take it over. One that keeps its inputs does not care who holds them.
        slots: which lifted numbers share an input, by type.
        kinds: the types of lifted numbers that the graph reads.
        draws: whether it draws random numbers.
        mode: the precision that it computes in.
        labels: how inputs and results lie: among the ranks (`RankLabels`: one rank's program under `shard_map`), or on the mesh of an annotated program
            (`AnnotatedLabels`: whole tensors, divided by XLA); None on one device.
        plan: how it is computed as loops over repeated layers; None if it is not.
        ports: what goes in and out as one array, what is donated, and in which order results leave.
        keeps_inputs: whether it takes over nothing, so that it may start early.
    """

    part: Part
    graph: fx.Graph
    inputs: tuple[int, ...]
    avals: tuple[jax.ShapeDtypeStruct, ...]
    owned: tuple[bool, ...]
    slots: Mapping[type, Slots]
    kinds: tuple[type, ...]
    draws: bool
    mode: Mode
    labels: RankLabels | AnnotatedLabels | None
    plan: fold_repeats.Plan | None
    ports: Ports
    keeps_inputs: bool = False

    @functools.cached_property
    def leaves(self) -> tuple[tuple[int, bool], ...]:
        """Leaves (by position) that may be taken over if they are free, and whether they were."""
        shared = self.part.shared
        return tuple((-v - 1, own) for v, own in zip(self.inputs, self.owned, strict=True) if v < 0 and -v - 1 not in shared)

    @property
    def results(self) -> tuple[int, ...]:
        """Ids of the values that it gives, in the order of the graph's results."""
        return self.part.results

    @property
    def outputs(self) -> Sequence[fx.Node]:
        """The nodes of the graph's results."""
        return results_of(self.graph)

    def accepts(self, run: Execution) -> bool:
        """Whether a program of this spec computes what an execution needs. It may want to take over more than is free (that is copied), not less."""
        if self.mode != run.mode or (self.labels is None) != (run.labels is None):
            return False
        if self.labels is not None and not self.labels.fit(run.labels, self):
            return False
        if any(places.label_at(run.passed[v].label, self.part.place) != label for v, label in self._passed_labels()):
            return False
        free = run.free
        if not self.takes_just(run) and any(free[at] and not own for at, own in self.leaves):
            return False
        return all(run.pack(self.slots[kind], kind) is not None for kind in self.kinds)

    def takes_just(self, run: Execution) -> bool:
        """Whether it takes over exactly what is free."""
        ats, owned = self._leaves_and_owned
        return list(map(run.free.__getitem__, ats)) == owned

    @functools.cached_property
    def _leaves_and_owned(self) -> tuple[list[int], list[bool]]:
        return [at for at, _ in self.leaves], [own for _, own in self.leaves]

    @functools.cached_property
    def leaf_of_port(self) -> list[int] | None:
        """By input port the leaf that comes in through it, if each is one leaf alone."""
        vids = [self.inputs[port[0]] for port in self.ports.inputs]
        return None if any(self.ports.stacked_inputs) or max(vids, default=-1) >= 0 else [-vid - 1 for vid in vids]

    def _passed_labels(self) -> list[tuple[int, PartitionSpec]]:
        """The inputs that are results of parts before, with their labels."""
        if not isinstance(self.labels, RankLabels) or not self.part.given:
            return []
        return [(v, label) for v, label in zip(self.inputs, self.labels.inputs, strict=True) if v >= 0]

    def passes(self) -> dict[int, Passed]:
        """What later parts can know of its results."""
        labels: Sequence[Any] = self.labels.outputs if isinstance(self.labels, RankLabels) else [None] * len(self.results)
        metas = [node.meta["val"] for node in self.outputs]
        avals = [jax.ShapeDtypeStruct(tuple(m.shape), dtypes.to_jax(m.dtype)) for m in metas]
        return {v: Passed(aval, label) for v, aval, label in zip(self.results, avals, labels, strict=True)}

    def abstract_results(self, lie: Sequence[Any] | None = None) -> list[AbstractArray]:
        """What comes out of each port, in the order in which they leave: shapes and places, from the graph alone.

        lie: of an annotated program, how results lie once it is compiled; else those that XLA places count as replicated.
        """
        metas = [node.meta["val"] for node in self.outputs]
        shapes = [tuple(m.shape) for m in metas]
        ports = self.ports
        places: list[Any]
        if isinstance(self.labels, AnnotatedLabels):
            places = list(lie or [s or spmd.replicated() for s in ports.output_shardings(self.labels.outputs)])
        elif self.labels is not None:
            shapes = [sharding.global_shape(shape, spec) for shape, spec in zip(shapes, self.labels.outputs, strict=True)]
            places = [jax.sharding.NamedSharding(self.labels.mesh, spec) for spec in ports.output_specs(self.labels.outputs)]
        else:
            places = [abstract_arrays.everywhere()] * len(ports.order)
        made = []
        for at, place in zip(ports.order, places, strict=True):
            first = ports.outputs[at][0]
            rows = (len(ports.outputs[at]),) if ports.stacked_outputs[at] else ()
            made.append(AbstractArray((*rows, *shapes[first]), dtypes.to_jax(metas[first].dtype), place))
        return made


def specify(trace: Trace, part: Part, run: Execution) -> ProgramSpec:
    """The spec of a part of a recorded structure, for programs that this execution and others like it can use."""
    segment = run.segment
    others = [program.spec.slots for program in trace.programs.get(part, ())]
    slots = scalar_inputs.share(trace.nodes, trace.sources, segment.numbers, others)
    builder = GraphBuilder(trace.nodes, trace.sources, part.results, part.given)
    inputs = tuple(builder.inputs)
    avals = tuple(map(run.aval, inputs))
    metas = {v: contiguous_meta(a.shape, dtypes.to_torch(a.dtype)) for v, a in zip(inputs, avals, strict=True)}
    graph = builder.build(metas, slots=slots)
    if SETTINGS.verify:
        segments.check_slots(segment, trace.nodes, slots)
        graphs.check(graph, trace.nodes, part.results, metas, slots, given=part.given)
    if run.mode == precision_mode.PLAIN and not isinstance(run.labels, AnnotatedSegment) and (least := fold_repeats.least()):
        time_steps.rewrite(graph, least)
        step_products.rewrite(graph, least)
        even_results.rewrite(graph, least)
    names = [n.target for n in graph.nodes if n.op == "placeholder"]
    kinds = tuple(kind for kind, name in ((float, "floats"), (int, "ints")) if name in names)
    draws = "draws" in names
    new = _updates(segment)
    keeps = (
        run.labels is None
        and part.is_whole
        and run.mode == precision_mode.PLAIN
        and kept_inputs.keeps_inputs(graph, [aval for v, aval in zip(inputs, avals, strict=True) if v in new])
    )
    owned = tuple(v < 0 and -v - 1 not in part.shared and (keeps or run.free[-v - 1]) for v in inputs)
    labels: RankLabels | AnnotatedLabels | None = None
    if isinstance(run.labels, AnnotatedSegment):
        labels = run.labels.label(graph, inputs, part.results)
    elif run.labels is not None:
        leaves = run.labels.at(part.place.mesh)
        given = [leaves[-v - 1] if v < 0 else places.label_at(run.passed[v].label, part.place) for v in inputs]
        extras = len(kinds) + draws + precision_mode.extra_count(run.mode)
        labels = shard_mapping.label(graph, part, segment, run.labels, given, avals, extras)
    updates = _new_values(graph, part, inputs, avals, owned, labels, new)
    plan = _fold(graph, inputs, labels, updates, run.mode)
    stacks = ((), ()) if plan is None else (plan.stacked_inputs(), [tuple(members) for _, members in plan.stacked])
    ports = Ports.of(len(inputs), len(part.results), *stacks).paired({} if keeps else updates)
    spec = ProgramSpec(part, graph, inputs, avals, owned, MappingProxyType(slots), kinds, draws, run.mode, labels, plan, ports, keeps)
    if SETTINGS.verify:
        verify_programs.check(spec, run)
    return spec


def local_aval(segment: Segment, leaf: int) -> jax.ShapeDtypeStruct:
    """Shape and dtype that each rank sees of a leaf (by position)."""
    array = segment.leaves[leaf]
    shape = tuple(array.shape)
    if sharding.active() and hasattr(array, "sharding"):
        shape = () if id(array) in segment.scalars else array.sharding.shard_shape(array.shape)
    return jax.ShapeDtypeStruct(shape, array.dtype)


def _new_values(
    graph: fx.Graph,
    part: Part,
    inputs: Sequence[int],
    avals: Sequence[jax.ShapeDtypeStruct],
    owned: Sequence[bool],
    labels: RankLabels | AnnotatedLabels | None,
    updates: dict[int, int],
) -> dict[int, int]:
    """For inputs that may be taken over: the result that is the new value of the same storage (`_updates`), and lies as the old one does."""
    metas = [node.meta["val"] for node in results_of(graph)]
    place = {vid: k for k, vid in enumerate(part.results)}
    found: dict[int, int] = {}
    for i, vid in enumerate(inputs):
        k = place.get(updates.get(vid, -1), -1) if owned[i] else -1
        if k < 0 or k in found.values():
            continue
        same_label = labels is None or labels.inputs[i] == labels.outputs[k]
        if same_label and (tuple(metas[k].shape), dtypes.to_jax(metas[k].dtype)) == (tuple(avals[i].shape), avals[i].dtype):
            found[i] = k
    return found


def _updates(segment: Segment) -> dict[int, int]:
    """Leaves (by id) whose storage gets a new value in this segment, and the id of that value."""
    found: dict[int, int] = {}
    for ref, leaf in segment.saved_with_leaves():
        storage = ref()
        if storage is not None and storage.segment is segment and storage.vid >= 0:
            found.setdefault(leaf, storage.vid)
    return found


def _fold(
    graph: fx.Graph, inputs: Sequence[int], labels: RankLabels | AnnotatedLabels | None, updates: dict[int, int], mode: Mode
) -> fold_repeats.Plan | None:
    """How to compute a graph as loops over repeated layers, if there are enough of them."""
    least = 0 if MODE.regions and manual_regions.nodes_of(graph) else fold_repeats.least()
    runs = fold_repeats.runs(graph, least) if least and mode == precision_mode.PLAIN else []
    if not runs:
        return None
    if SETTINGS.verify:
        repeats.check(graph, runs)
    metas = [(tuple(n.meta["val"].shape), n.meta["val"].dtype) for n in results_of(graph)]
    leaves = sum(v < 0 for v in inputs)

    def inputs_alike(places: Sequence[int]) -> bool:
        if any(i >= leaves for i in places):
            return False
        return labels is None or all(labels.inputs[i] == labels.inputs[places[0]] for i in places)

    def results_alike(places: Sequence[int]) -> bool:
        same = all(metas[k] == metas[places[0]] for k in places)
        return same and (labels is None or all(labels.outputs[k] == labels.outputs[places[0]] for k in places))

    plan = fold_repeats.Plan(graph, runs, updates, inputs_alike, results_alike)
    if SETTINGS.verify:
        loops.check(plan, graph)
    return plan
