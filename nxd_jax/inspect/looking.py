"""`look`: everything there is to see of a program, on one object."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import torch
from torch.utils._pytree import tree_leaves

from nxd_jax.inspect import differences, nodes, subjects
from nxd_jax.inspect.differences import Difference
from nxd_jax.inspect.inspection import Inspection
from nxd_jax.inspect.pipeline_inspection import PipelineInspection
from nxd_jax.inspect.tables import Table
from nxd_jax.pipeline import step_log
from nxd_jax.topology import Topology
from torch_bridge.mesh import abstract_arrays
from torch_bridge.recorder.tensor import XLATensor
from torch_bridge.runtime import abstract, executor, session
from torch_bridge.telemetry import activity


@runtime_checkable
class RunOnShapes(Protocol):
    """What `nxd_jax.abstract_run` gives."""

    @property
    def topology(self) -> Topology:
        """The machines whose memory counts."""

    def recorded_run(self) -> abstract.Run:
        """What was recorded."""


def look(target: object = None, *example_inputs: Any, topology: Topology | None = None) -> Inspection:
    """Look inside something.

    target: None: the last executed step (the largest of its programs; within an abstract run the largest recorded so far). Of a training step of a pipeline
    all programs, as a `PipelineInspection`. An `nxd_jax.abstract_run`: likewise. An `nn.Module`: captured on `example_inputs`, whose shapes and dtypes alone
    matter; or a graph from `torch_bridge.capture`. An xla tensor or a nest of them: what is recorded for them and has not run, which is left as it is. A
    `torch_bridge` program.
    topology: whose cores the memory is compared with; default the one that the environment describes (in an abstract run, the run's).

    Raises ValueError if nothing has run yet, TypeError for a target of another kind.
    """
    from torch_bridge.compiler.program import Program

    if isinstance(target, RunOnShapes):
        return _of_run(target.recorded_run(), topology or target.topology)
    if target is None:
        return _last_step(topology) if abstract_arrays.ACTIVE.run is None else _of_run(abstract_arrays.ACTIVE.run, topology)
    if isinstance(target, Program):
        return Inspection(subjects.OfProgram(target, _recorded(target)), topology)
    if isinstance(target, torch.nn.Module):
        return Inspection(subjects.of_module(target, example_inputs), topology)
    tensors = tree_leaves((target, *example_inputs))
    if tensors and all(isinstance(t, XLATensor) for t in tensors):
        return Inspection(subjects.of_tensors(tensors), topology)
    raise TypeError(
        f"look takes nothing (the last step), an abstract run, an nn.Module with example inputs, or xla tensors, got {type(target).__name__}"
    )


def _recorded(program: object) -> abstract.Recorded | None:
    return None if abstract_arrays.ACTIVE.run is None else abstract_arrays.ACTIVE.run.programs.get(id(program))


def _last_step(topology: Topology | None) -> Inspection:
    programs = list(dict.fromkeys(session.current().recent))
    if not programs:
        raise ValueError(
            "nothing has run yet in this process: run a training step (xm.mark_step() ends it), or look at a module: inspect.look(model, *example_inputs)"
        )
    pipeline = step_log.last(set(programs))
    if pipeline is not None:
        return PipelineInspection(pipeline, None, topology)
    last = max((p.step for p in programs if p.step < activity.ACTIVITY.steps), default=programs[-1].step)
    of_step = sorted((p for p in programs if p.step == last), key=lambda p: -nodes.ops(p.graph))
    found = [subjects.OfProgram(p) for p in of_step]
    return Inspection(found[0], topology, tuple(Inspection(s, topology) for s in found[1:]))


def _of_run(run: abstract.Run, topology: Topology | None) -> Inspection:
    executor.sync()
    pipeline = step_log.last({r.program for r in run.programs.values()})
    if pipeline is not None:
        return PipelineInspection(pipeline, run, topology)
    found = sorted(run.programs.values(), key=lambda r: -nodes.ops(r.program.graph))
    if not found:
        raise ValueError("this abstract run has recorded nothing yet: within the `with` block, run a training step on tensors on xla first")
    made = [subjects.OfProgram(r.program, r) for r in found]
    return Inspection(made[0], topology, tuple(Inspection(s, topology) for s in made[1:]))


def compare(before: Inspection, after: Inspection) -> Table[Difference]:
    """What differs between two graphs, causes before consequences: modes and inputs, or else the first ops and arguments. Empty if they are the same.

    For programs of this process `inspect.recompiles()` says it too, with sharding, precision and donated memory.
    """
    return differences.table(differences.differences(before.graph.rows, after.graph.rows))
