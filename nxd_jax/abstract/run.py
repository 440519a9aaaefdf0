"""`abstract_run`: run a training script on shapes alone, and find out what every core would need."""

from __future__ import annotations

import contextlib
import os
import resource
import sys
import time
from collections.abc import Iterator

import torch.distributed as dist

from nxd_jax.abstract._models import models_on_meta
from nxd_jax.abstract.report import AbstractReport, PipelineReport, ProgramReport
from nxd_jax.abstract.shapes import Witness
from nxd_jax.inspect import partitioned
from nxd_jax.inspect.collectives import collectives
from nxd_jax.inspect.pipeline_inspection import PipelineInspection
from nxd_jax.pipeline import step_log
from nxd_jax.tensor_parallel import parallel_groups
from nxd_jax.topology import Topology
from torch_bridge.mesh import abstract_arrays, spmd, world
from torch_bridge.runtime import abstract, executor
from torch_bridge.telemetry import activity


class AbstractRun:
    """What `abstract_run` gives. `programs`: recorded so far, in the order in which they came (`torch_bridge.runtime.abstract.Recorded`)."""

    def __init__(self, run: abstract.Run, witness: Witness, topology: Topology | None):
        self._run = run
        self._witness = witness
        self._topology = topology
        self._started = time.perf_counter()
        self._compiling = 0.0

    @property
    def topology(self) -> Topology:
        """The machines whose memory counts."""
        return self._topology or Topology.from_environment()

    def recorded_run(self) -> abstract.Run:
        """What `torch_bridge` recorded. Raises RuntimeError after the end of the `with` block."""
        self._check("look")
        return self._run

    def _check(self, what: str) -> None:
        if abstract_arrays.ACTIVE.run is not self._run:
            raise RuntimeError(f"{what}() after the end of abstract_run: call it within the `with` block, where the ranks are laid out")

    @property
    def programs(self) -> list[abstract.Recorded]:
        return list(self._run.programs.values())

    def report(self, programs: int = 1) -> AbstractReport:
        """Compile the `programs` largest programs (the training step is the largest one as a rule) and say what they need. Of a training step of a pipeline all
        are compiled, those that do the same on several ranks once.

        What is still recorded is a program too. Raises RuntimeError after the end of the `with` block, or if nothing has been recorded.
        """
        self._check("report")
        executor.sync()
        found = sorted(self.programs, key=lambda p: -p.ops)
        if not found:
            raise RuntimeError("report() without a program: within the `with` block, run a training step on tensors on xla first")
        recording = time.perf_counter() - self._started - self._compiling
        topology = self.topology
        pipeline = self._pipeline(topology)
        if pipeline is None:
            chosen = found[: max(programs, 1)]
        else:
            chosen = list({p.structure: p for p in found if p.compiled}.values())
        reports = tuple(self._compiled(p) for p in chosen)
        self._compiling = sum(p.trace_seconds + p.lower_seconds + p.compile_seconds for p in found)
        kinds = self._witness.bytes_by_kind()
        if pipeline is not None:
            fullest = max(pipeline.ranks, key=lambda memory: memory.peak).kinds()
            kinds = {kind: fullest.get(kind, 0) for kind in kinds}
        return AbstractReport(
            cores=len(spmd.devices()) or world.size(),
            axes=_axes(),
            core=f"a core of {topology.chip.name} at LNC {topology.lnc}",
            hbm_bytes=topology.hbm_per_core,
            kinds=kinds,
            programs=reports,
            skipped=sum(not p.compiled for p in found),
            pipeline=pipeline,
            record_seconds=recording,
            host_bytes=_most_memory(),
        )

    def _pipeline(self, topology: Topology) -> PipelineReport | None:
        """The last training step of a pipeline, if there was one."""
        log = step_log.last({p.program for p in self.programs})
        if log is None:
            return None
        step = PipelineInspection(log, self._run, topology)
        return PipelineReport(step.name, step.ranks, step.stages, step.programs, step.collectives)

    def _compiled(self, recorded: abstract.Recorded) -> ProgramReport:
        compiled = recorded.compile(abstract.QUICK)
        memory = compiled.memory_analysis()
        annotated = partitioned.table(compiled.as_text(), _axes(), None) if spmd.active() else None
        return ProgramReport(
            name=activity.describe(recorded.program).source,
            ops=recorded.ops,
            runs=recorded.runs,
            arguments=int(memory.argument_size_in_bytes),
            outputs=int(memory.output_size_in_bytes),
            aliased=int(memory.alias_size_in_bytes),
            temporaries=int(memory.temp_size_in_bytes),
            collectives=collectives(recorded.jaxpr, dict(world.current().axes)) if annotated is None else tuple(annotated.rows),
            trace_seconds=recorded.trace_seconds,
            lower_seconds=recorded.lower_seconds,
            compile_seconds=recorded.compile_seconds,
        )


@contextlib.contextmanager
def abstract_run(cores: int | None = None, *, instance: str | None = None, nodes: int = 1, values: str = "error") -> Iterator[AbstractRun]:
    """A block in which tensors on xla have shapes and no values: nothing is allocated, drawn or computed, whatever the number of cores.

        with nxd_jax.abstract_run(instance="trn1.32xlarge", nodes=4) as run:  # 128 cores
            model = nxd.initialize_parallel_model(nxd_config, get_model)
            ...                                                                 # one training step, as always
            print(run.report())

    cores: ranks of the world; None: all of the instance's, or without an instance the world as it is (`NEURON_RT_NUM_CORES`, or as many as the parallel
    sizes need). instance, nodes: the machines to emulate, whose memory per core counts; default those of the environment.
    values: what reading a tensor does: "error" raises `torch_bridge.mesh.abstract_arrays.AbstractValueError`, "zeros" gives zeros.

    Models made in the block have parameters on "meta" until they go to xla. CPU tensors of up to 65,536 elements keep their values, on xla too. The world and
    its groups are undone at the end of the block; tensors made in it are lost then.

    The block concerns the thread that enters it, with the loaders and step closures that it starts; other threads go on with values.

    With annotations (`xr.use_spmd`, best called in the block, which then has as many devices as cores) each program is compiled when it is met: XLA decides
    how results lie.

    Raises ValueError for sizes that are not possible, RuntimeError within another abstract run, in one of several processes (torchrun), with `cores` or
    `instance` where torch.distributed is initialised already, and with as many cores as there are not devices after `xr.use_spmd`.
    """
    topology = None if instance is None else Topology(instance, nodes=nodes)
    count = topology.core_count if cores is None and topology is not None else cores
    if count is not None and count < 1:
        raise ValueError(f"cores={count}: an abstract run has at least 1 core")
    if topology is not None and count is not None and count > topology.core_count:
        raise ValueError(f"cores={count}: {nodes} x {instance} have {topology.core_count} cores; give more nodes")
    if spmd.active() and count not in (None, len(spmd.devices())):
        raise RuntimeError(
            f"abstract_run with {count} cores after xr.use_spmd(), which took {len(spmd.devices())} devices: call xr.use_spmd() in the `with` block, or leave "
            "out cores= and instance="
        )
    if count is not None and dist.is_initialized():
        raise RuntimeError(
            f"abstract_run with {count} cores of its own after torch.distributed was initialised: leave out cores= and instance=, or call it before "
            "init_process_group (or after destroy_process_group)"
        )
    if count is None and world.process_count() > 1:
        raise RuntimeError(
            f"abstract_run in one of {world.process_count()} processes: start the script once, without torchrun, and give cores= (one process stands for all)"
        )
    witness = Witness()
    run = abstract.Run(values, training=witness)
    with contextlib.ExitStack() as block:
        if topology is not None and count == topology.core_count:
            block.enter_context(_environment(NXD_JAX_INSTANCE=str(instance), NXD_JAX_NNODES=str(nodes)))
        if not spmd.active():
            if count is not None:
                local = None if topology is None else min(count, topology.cores_per_node)
                block.enter_context(_world(world.World(count, local_size=local)))
            block.enter_context(_without_annotations())
        run.start()
        block.callback(run.stop)
        witness.start()
        block.callback(witness.stop)
        block.enter_context(models_on_meta())
        yield AbstractRun(run, witness, topology)


def _axes() -> dict[str, int]:
    """The mesh axes and their sizes, outermost first; with annotations those of the script's first mesh."""
    return {str(axis): int(size) for axis, size in (spmd.mesh().shape if spmd.active() else world.current().axes).items()}


@contextlib.contextmanager
def _world(new: world.World) -> Iterator[None]:
    """Another world; what was laid out on it is undone."""
    before = world._world
    world.configure(new)
    try:
        yield
    finally:
        parallel_groups.destroy()
        if dist.is_initialized():
            dist.destroy_process_group()
        world.configure(before)


@contextlib.contextmanager
def _without_annotations() -> Iterator[None]:
    """Annotations that the block switches on (`xr.use_spmd`) are off after it, and the world is what it was."""
    before = world._world
    try:
        yield
    finally:
        if spmd.active():
            from torch_bridge.torch_xla.distributed.spmd import meshes

            meshes.forget_global_mesh()
            spmd.stop()
            executor.clear_cache()
            world.configure(before)


@contextlib.contextmanager
def _environment(**variables: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _most_memory() -> int:
    """The largest resident size of this process so far, in bytes."""
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024
