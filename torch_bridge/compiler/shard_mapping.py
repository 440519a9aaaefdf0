"""A program for several ranks: which axes its inputs and results vary over, and the `shard_map` around it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from torch import fx

from torch_bridge import lowerings
from torch_bridge.compiler.program_io import Ports
from torch_bridge.config.settings import SETTINGS
from torch_bridge.ir.graph import results_of
from torch_bridge.ir.segment import Results, Segment
from torch_bridge.mesh import abstract_arrays, messages, places, processes, random_state, sharding, world
from torch_bridge.mesh.places import Place
from torch_bridge.passes import check_replicas, varying_axes
from torch_bridge.passes.cut_segment import Part
from torch_bridge.passes.verify import axes
from torch_bridge.script import rank_branches, rank_environment
from torch_bridge.source import NOWHERE

if TYPE_CHECKING:
    from torch_bridge.compiler.program_spec import Execution, ProgramSpec


class SegmentLabels(NamedTuple):
    """How a segment lies among the ranks.

    leaves: the labels of its leaves; wanted: by value id, the label that a result storage insists on; independent: whether ranks draw random numbers of
    their own.
    """

    leaves: tuple[PartitionSpec, ...]
    wanted: dict[int, PartitionSpec]
    independent: bool

    def at(self, mesh: Mesh | None) -> tuple[PartitionSpec, ...]:
        """The labels that the leaves have on the mesh of a place."""
        narrow = None if mesh is None else places.ranks(mesh)
        return self.leaves if narrow is None else tuple(places.project(spec, narrow) for spec in self.leaves)


def of(segment: Segment, live: Results) -> SegmentLabels:
    """The labels of a segment whose results these storages wait for."""
    wanted = {
        v: spec for v, holders in live.items() for spec in [next((s.spec for s in holders if s.spec is not None), None)] if spec is not None
    }
    return SegmentLabels(tuple(map(sharding.spec_of, segment.leaves)), wanted, bool(segment.draws) and random_state.independent())


def label(
    graph: fx.Graph,
    part: Part,
    segment: Segment,
    of_segment: SegmentLabels,
    inputs: Sequence[PartitionSpec],
    avals: Sequence[jax.ShapeDtypeStruct],
    extras: int,
) -> RankLabels:
    """The labels of a part's results, from those of its inputs; every node of the graph gets its axes (`varying_axes.spread`).

    avals: of the inputs, as a rank sees them; extras: how many inputs come after them that all ranks share (numbers, draws).
    """
    mesh = part.place.mesh or sharding.mesh()
    given = [sharding.axes_of(spec) for spec in inputs]
    with _ranks_of(mesh):
        varying_axes.spread(graph, given)
        if SETTINGS.verify:
            axes.check(graph, given)
    if mesh != sharding.mesh():
        _fits_mesh(graph, part, mesh)
    meeting = _meeting(graph, part.place)
    rank_environment.note(last=True)
    rank_branches.check(n.meta["source"] for n in graph.nodes if "source" in n.meta)
    results = results_of(graph)
    varied = tuple(node.meta["axes"] for node in results)
    wanted = tuple(of_segment.wanted.get(v) for v in part.results)
    updated = dict(zip(part.results, varied, strict=True))
    check_replicas.check(segment, updated)
    if SETTINGS.verify:
        axes.check_drift(segment, updated)
    return RankLabels(
        mesh=mesh,
        inputs=tuple(inputs),
        outputs=tuple(_label(own, spec) for own, spec in zip(varied, wanted, strict=True)),
        axes=varied,
        wanted=wanted,
        independent=of_segment.independent,
        local_inputs=tuple(tuple(a.shape) for a in avals),
        scalar_outputs=tuple(not node.meta["val"].dim() for node in results),
        extras=extras,
        meeting=meeting,
    )


@dataclass(frozen=True)
class RankLabels:
    """How the inputs and results of a program lie among the ranks.

    Attributes:
        mesh: the devices that it runs on.
        inputs: the labels of its inputs (numbers and draws are shared by all ranks).
        outputs: the labels of its results.
        axes: the axes that each result varies over.
        wanted: the labels that result storages insist on, None where they do not.
        independent: whether ranks draw random numbers of their own.
        local_inputs: the shapes of inputs as a rank sees them.
        scalar_outputs: whether a rank sees a result as a number.
        extras: how many inputs come after the labelled ones.
        meeting: where the processes that run it meet before they do so for the first time; None if it is one, or without collectives.
    """

    mesh: Mesh
    inputs: tuple[PartitionSpec, ...]
    outputs: tuple[PartitionSpec, ...]
    axes: tuple[sharding.Axes, ...]
    wanted: tuple[PartitionSpec | None, ...]
    independent: bool
    local_inputs: tuple[tuple[int, ...], ...]
    scalar_outputs: tuple[bool, ...]
    extras: int
    meeting: processes.Meeting | None = None

    def fit(self, given: object, spec: ProgramSpec) -> bool:
        """Whether the leaves and results of another execution have these labels."""
        if not isinstance(given, SegmentLabels) or given.independent != self.independent:
            return False
        wanted = given.wanted
        leaves = given.at(self.mesh)
        return all(wanted.get(v) == label for v, label in zip(spec.results, self.wanted, strict=True)) and all(
            leaves[-v - 1] == label for v, label in zip(spec.inputs, self.inputs, strict=True) if v < 0
        )

    def wrap(self, run: Callable[..., Any], ports: Ports) -> Callable[..., Any]:
        """`run` on every rank's own blocks, its inputs and results as the ports say."""
        labels = ports.output_specs(self.outputs)
        alone = [not ports.stacked_outputs[at] and self.scalar_outputs[ports.outputs[at][0]] for at in ports.order]
        vectors = [scalar and bool(sharding.axes_of(spec)) for scalar, spec in zip(alone, labels, strict=True)]
        shapes = ports.shapes(self.local_inputs)

        def blocks(*inputs: Any) -> Any:
            own = [x.reshape(shape) for x, shape in zip(inputs, shapes, strict=False)]
            with _ranks_of(self.mesh):
                results = run(*own, *inputs[len(own) :])
            return tuple(r.reshape(1) if vector else r for r, vector in zip(results, vectors, strict=True))

        specs = (*ports.input_specs(self.inputs), *[PartitionSpec()] * self.extras)
        return jax.shard_map(blocks, mesh=self.mesh, in_specs=specs, out_specs=tuple(labels), check_vma=False)

    def jit_options(self, ports: Ports) -> dict[str, Any]:
        """For `jax.jit`: nothing, `shard_map` says how results lie."""
        return {}

    def told(self) -> tuple[Any, ...]:
        """What a compiled program depends on."""
        return (self.inputs, self.outputs, self.local_inputs, self.scalar_outputs, self.extras)

    def check(self, spec: ProgramSpec, run: Execution) -> None:
        """For the verifier: inputs lie as labelled, and results as their storages want (`verify_programs`)."""
        from torch_bridge.compiler import verify_programs

        verify_programs.check_labels(spec, self, run)

    def placed(self, args: Sequence[Any], donated: Sequence[int] = ()) -> list[Any]:
        """The arguments on the devices of the mesh: packed numbers and draws on each, arrays of another mesh moved.

        donated: places of those that the program takes over. Of one on the whole mesh it gets a copy: its block is still a part of that.
        """
        mesh = self.mesh
        if not places.in_use():
            return [places.numbers(a, mesh) if isinstance(a, np.ndarray) else a for a in args]
        found = []
        for a in args:
            if isinstance(a, np.ndarray):
                found.append(places.numbers(a, mesh))
            else:
                found.append(a if getattr(a.sharding, "mesh", None) is mesh else places.put(a, mesh))
        for at in donated:
            if found[at] is not args[at] and not abstract_arrays.active():
                found[at] = jnp.array(found[at], copy=True)
        return found


def _ranks_of(mesh: Mesh) -> contextlib.AbstractContextManager[None]:
    """A block in which the ranks of a mesh are all there are."""
    narrow = places.ranks(mesh)
    return contextlib.nullcontext() if narrow is None else world.taken_for(narrow)


def _fits_mesh(graph: fx.Graph, part: Part, mesh: Mesh) -> None:
    """On a part of the world's mesh a collective must not name ranks that are not there."""
    sizes = world.current().axes
    gone = {name for name, size in mesh.shape.items() if size != sizes[name]}
    narrow = places.ranks(mesh)
    there = set(range(world.size()) if narrow is None else narrow.order)
    for node in graph.nodes:
        op = lowerings.lookup(node.target)
        if op is None or not op.collective:
            continue
        text: Any = node.args[-1]
        groups = [set(group) for group in json.loads(text)] if text.startswith("[") else []
        if gone.intersection(text.split(",")) or any(not group <= there and group & there for group in groups):
            raise NotImplementedError(
                f"{node.target} at {node.meta.get('source', NOWHERE).where} names ranks along {', '.join(sorted(gone))}, and its tensor lies at "
                f"{part.place.name!r} alone (a pipeline stage, say), where these ranks are not: the other ranks have no value of their own. Reduce over the "
                "tensor-, data- or context-parallel group; what stages have in common is added up by the pipeline"
            )


def _meeting(graph: fx.Graph, place: Place) -> processes.Meeting | None:
    """Several processes must run the same collectives: those of a place alone, or all of them."""
    if world.process_count() == 1 or abstract_arrays.active():
        return None
    found = []
    for node in graph.nodes:
        if lowerings.is_collective(node.target):
            shapes = [
                f"{str(n.meta['val'].dtype).removeprefix('torch.')}{list(n.meta['val'].shape)}"
                for n in node.all_input_nodes
                if "val" in n.meta
            ]
            plain = [str(a) for a in node.args if not isinstance(a, (fx.Node, list, tuple))]
            found.append(
                (f"{str(node.target).split('.')[1]} of {', '.join(shapes)} ({', '.join(plain)})", node.meta.get("source", NOWHERE).where)
            )
    return processes.meeting(found, None if place.mesh is None else messages.processes_of(place))


def _label(varied: sharding.Axes, wanted: PartitionSpec | None) -> PartitionSpec:
    """How a result is labelled: as its storage wants if that says enough, else side by side along dim 0."""
    if wanted is not None:
        if varied <= sharding.axes_of(wanted):
            return wanted
        varied |= sharding.axes_of(wanted)
    return sharding.spec_for(varied)
