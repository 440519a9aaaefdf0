"""How the inputs and results of an annotated program lie on the mesh (`mesh.spmd`): what `RankLabels` is for a program of ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np
import torch
from jax.sharding import Mesh, NamedSharding
from torch import fx

from torch_bridge.compiler.program_io import Ports
from torch_bridge.ir.segment import Results, Segment
from torch_bridge.mesh import abstract_arrays, places, processes, spmd, world
from torch_bridge.passes.verify import report
from torch_bridge.source import NOWHERE

if TYPE_CHECKING:
    from torch_bridge.compiler.program_spec import Execution, ProgramSpec


class AnnotatedSegment(NamedTuple):
    """How a segment lies on the mesh.

    leaves: the shardings of its leaves; wanted: by value id, the sharding that a result storage was annotated with, or that its value had before it was
    updated. What is not wanted lies as XLA decides.
    """

    leaves: tuple[NamedSharding, ...]
    wanted: dict[int, NamedSharding]

    def label(self, graph: fx.Graph, inputs: Sequence[int], results: Sequence[int]) -> AnnotatedLabels:
        """The labels of a program that takes and gives values of these ids. Raises `processes.ProgramsDiffer` if another process is about to run another."""
        return AnnotatedLabels(
            mesh=spmd.mesh(),
            inputs=tuple(self.leaves[-v - 1] if v < 0 else None for v in inputs),
            outputs=tuple(self.wanted.get(v) for v in results),
            meeting=_meeting(graph),
        )


def of(segment: Segment, live: Results) -> AnnotatedSegment:
    """How a segment lies whose results these storages wait for."""
    leaves = tuple(_lies(array) for array in segment.leaves)
    wanted: dict[int, NamedSharding] = {}
    for ref, leaf in segment.saved_with_leaves():
        storage = ref()
        if storage is not None and storage.segment is segment and storage.vid in live:
            before = segment.leaves[-leaf - 1]
            if tuple(before.shape) == tuple(storage.layout.size):
                wanted.setdefault(storage.vid, leaves[-leaf - 1])
    for vid, holders in live.items():
        said = next((s.spec for s in holders if isinstance(s.spec, NamedSharding)), None)
        if said is not None:
            wanted[vid] = spmd.in_order(said)
    return AnnotatedSegment(leaves, wanted)


def _lies(array: Any) -> NamedSharding:
    found = spmd.lies(array)
    assert found is not None, f"a leaf of an annotated program lies as {array.sharding}"
    return found


@dataclass(frozen=True)
class AnnotatedLabels:
    """How the inputs and results of a program lie.

    Attributes:
        mesh: of all devices.
        inputs: the sharding of each input; None for what an earlier part of the same segment gives.
        outputs: the sharding that a result must have; None: XLA chooses.
        meeting: where the processes that run it meet before they do so for the first time; None if it is one.
    """

    mesh: Mesh
    inputs: tuple[NamedSharding | None, ...]
    outputs: tuple[NamedSharding | None, ...]
    meeting: processes.Meeting | None = None

    def fit(self, given: object, spec: ProgramSpec) -> bool:
        """Whether the leaves and results of another execution lie so."""
        if not isinstance(given, AnnotatedSegment) or spmd.mesh() != self.mesh:
            return False
        return all(given.wanted.get(v) == label for v, label in zip(spec.results, self.outputs, strict=True)) and all(
            given.leaves[-v - 1] == label for v, label in zip(spec.inputs, self.inputs, strict=True) if v < 0
        )

    def wrap(self, run: Callable[..., Any], ports: Ports) -> Callable[..., Any]:
        """`run` itself: a program sees whole tensors."""
        return run

    def jit_options(self, ports: Ports) -> dict[str, Any]:
        """For `jax.jit`: how results are to lie."""
        return {"out_shardings": tuple(ports.output_shardings(self.outputs))}

    def placed(self, args: Sequence[Any], donated: Sequence[int] = ()) -> list[Any]:
        """The arguments on the mesh: packed numbers and draws on each device. donated: as with `RankLabels.placed`; arrays of the script stay whole here."""
        return [places.numbers(a, self.mesh) if isinstance(a, np.ndarray) else spmd.adopt(a) for a in args]

    def lowered_for(self, args: Sequence[Any], every: bool = False) -> list[Any]:
        """The same arguments for lowering. JAX names how results lie that nothing was said of by the mesh of the first argument that is used, and raises if
        that has no axes to say it with; so where there are several meshes, arguments are on one that has the axes of all. every: also where there is one."""
        meshes: list[Any] = [s.mesh for s in (*(a.sharding for a in args), *self.outputs) if isinstance(s, NamedSharding)]
        if not every and len(set(meshes)) < 2:
            return list(args)
        return [
            jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=spmd.refined(a.sharding, meshes))
            if isinstance(a.sharding, NamedSharding)
            else a
            for a in args
        ]

    def told(self) -> tuple[Any, ...]:
        """What a compiled program depends on."""
        return ("annotated", [_told(s) for s in self.inputs], [_told(s) for s in self.outputs])

    def check(self, spec: ProgramSpec, run: Execution) -> None:
        """For the verifier: inputs are labelled as their arrays lie."""
        for vid, label in zip(spec.inputs, self.inputs, strict=True):
            if vid < 0 and spmd.lies(run.segment.leaves[-vid - 1]) != label:
                report.fail("annotated_labels", "an input is labelled as its array lies", f"{label} for leaf {vid}")


def _meeting(graph: fx.Graph) -> processes.Meeting | None:
    """All processes must run the same program."""
    if world.process_count() == 1 or abstract_arrays.active():
        return None
    calls = [node for node in graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
    return processes.meeting([(_call(node), node.meta.get("source", NOWHERE).where) for node in calls])


def _call(node: fx.Node) -> str:
    val = node.meta.get("val")
    shape = f" -> {str(val.dtype).removeprefix('torch.')}{list(val.shape)}" if isinstance(val, torch.Tensor) else ""
    plain = [str(a) for a in node.args if not isinstance(a, (fx.Node, list, tuple))]
    return f"{node.target}({', '.join(plain)}){shape}"


def _told(sharding: NamedSharding | None) -> str:
    return "" if sharding is None else spmd.text(sharding)
