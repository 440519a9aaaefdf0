"""A program for several ranks: which axes its inputs and results vary over, and the `shard_map` around it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec
from torch import fx

from torch_bridge import lowerings
from torch_bridge.compiler.program_io import Ports
from torch_bridge.ir.segment import Segment, Storage
from torch_bridge.mesh import abstract_arrays, processes, random_state, sharding, world
from torch_bridge.passes import check_replicas, varying_axes
from torch_bridge.passes.verify import axes, report
from torch_bridge.precision import precision_mode
from torch_bridge.script import rank_branches
from torch_bridge.source import NOWHERE


def of(segment: Segment, live: dict[int, list[Storage]], outs: Sequence[int]) -> tuple[Any, ...]:
    """What a program must have been made for: the leaves' labels, the labels that result storages insist on, and who draws which random numbers."""
    wanted = tuple(next((s.spec for s in live[v] if s.spec is not None), None) for v in outs)
    return tuple(sharding.spec_of(leaf) for leaf in segment.leaves), wanted, bool(segment.draws) and random_state.independent()


class RankLabels:
    """Labels of a program's inputs and outputs on the mesh.

    inputs: of the used leaves (numbers and draws are shared by all ranks); outputs: in the order of `outs`.
    """

    def __init__(self, program: Any, segment: Segment, outs: Sequence[int], labels: tuple[Any, ...]):
        leaves, self.wanted, self.independent = labels
        self.mesh = sharding.mesh()
        self.inputs = [leaves[i] for i in program.used]
        given = [sharding.axes_of(spec) for spec in self.inputs]
        varying_axes.spread(program.graph, given)
        if report.ON:
            axes.check(program.graph, given)
        _agree(program.graph)
        rank_branches.check(n.meta["source"] for n in program.graph.nodes if "source" in n.meta)
        results = program._outputs()
        self.axes = [node.meta["axes"] for node in results]
        self.outputs = [_label(varied, spec) for varied, spec in zip(self.axes, self.wanted, strict=True)]
        self.local_inputs = [tuple(a.shape) for a in program.leaf_avals]
        self.scalar_outputs = [not node.meta["val"].dim() for node in results]
        self.extras = len(program.takes_kinds) + program.takes_draws + precision_mode.extra_count(program.mode)
        updated = dict(zip(outs, self.axes, strict=True))
        check_replicas.check(program, segment, updated)
        if report.ON:
            axes.check_drift(segment, updated)

    def fit(self, labels: Any, used: Sequence[int]) -> bool:
        """Whether the leaves and results of another run have these labels."""
        leaves, wanted, independent = labels
        return (self.wanted, self.independent) == (wanted, independent) and all(
            leaves[i] == spec for i, spec in zip(used, self.inputs, strict=True)
        )

    def wrap(self, run: Callable[..., Any], ports: Ports) -> Callable[..., Any]:
        """`run` on every rank's own blocks, its inputs and results as the ports say."""
        labels = ports.output_specs(self.outputs)
        alone = [not ports.stacked_outputs[at] and self.scalar_outputs[ports.outputs[at][0]] for at in ports.order]
        vectors = [scalar and bool(sharding.axes_of(spec)) for scalar, spec in zip(alone, labels, strict=True)]
        shapes = ports.shapes(self.local_inputs)

        def blocks(*inputs: Any) -> Any:
            own = [x.reshape(shape) for x, shape in zip(inputs, shapes, strict=False)]
            results = run(*own, *inputs[len(own) :])
            return tuple(r.reshape(1) if vector else r for r, vector in zip(results, vectors, strict=True))

        specs = (*ports.input_specs(self.inputs), *[PartitionSpec()] * self.extras)
        return jax.shard_map(blocks, mesh=self.mesh, in_specs=specs, out_specs=tuple(labels), check_vma=False)

    def placed(self, args: Sequence[Any]) -> list[Any]:
        """The arguments with packed numbers and draws on every rank's device."""
        return [sharding.replicated(a) if isinstance(a, np.ndarray) else a for a in args]


def _agree(graph: fx.Graph) -> None:
    """Several processes must run the same collectives."""
    if world.process_count() == 1 or abstract_arrays.active():
        return
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
    processes.agree(found)


def _label(varied: sharding.Axes, wanted: PartitionSpec | None) -> PartitionSpec:
    """How a result is labelled: as its storage wants if that says enough, else side by side along dim 0."""
    if wanted is not None:
        if varied <= sharding.axes_of(wanted):
            return wanted
        varied |= sharding.axes_of(wanted)
    return sharding.spec_for(varied)
