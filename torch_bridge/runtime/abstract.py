"""Abstract runs: tensors on xla have shapes, dtypes and a place on the mesh, and no values. Programs are recorded and never executed.

While a `Run` is active, `AbstractArray`s stand where JAX arrays would: what is moved to xla becomes one, and so does every result of a program, whose
shape follows from its graph alone. So weights are not allocated, and a world may have more ranks than JAX has devices (`devices`). A program is traced
and compiled only when somebody asks what it needs (`Recorded.compile`). `nxd_jax.abstract_run` is the front of this.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import jax

from torch_bridge import _compat
from torch_bridge.compiler import cache_keys
from torch_bridge.compiler.annotated_labels import AnnotatedLabels
from torch_bridge.compiler.program import Program
from torch_bridge.compiler.shard_mapping import RankLabels
from torch_bridge.ir import dtypes
from torch_bridge.mesh import abstract_arrays, places
from torch_bridge.mesh.abstract_arrays import KEPT, VALUES, AbstractArray, Live, everywhere
from torch_bridge.runtime import session

QUICK: dict[str, Any] = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
"""Options for compiling a program that nobody runs: machine code is generated as cheaply as possible. The memory plan is made before that."""


def uploaded(t: Any) -> Any:
    """For `transfer.to_array`: a CPU tensor, or one on "meta", as an array that all ranks share."""
    from torch_bridge.precision import precision_mode
    from torch_bridge.runtime import transfer

    host = precision_mode.uploaded(transfer.to_numpy(t)).copy() if t.device.type != "meta" and t.numel() <= KEPT else None
    return AbstractArray(t.shape, dtypes.to_jax(t.dtype), everywhere(), host)


# -- programs --------------------------------------------------------------------------------------


def _signature(program: Program, args: Sequence[Any]) -> list[jax.ShapeDtypeStruct]:
    """The inputs as `jax.jit` is to see them, on the mesh of the program; packed numbers and draws are the same on all ranks."""
    labels = program.spec.labels
    if labels is None:
        return [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in args]
    if isinstance(labels, AnnotatedLabels):
        return [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding) for a in labels.lowered_for(labels.placed(args))]
    placed = [a if getattr(getattr(a, "sharding", None), "mesh", None) == labels.mesh else places.put(a, labels.mesh) for a in args]
    return [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding) for a in placed]


@dataclass
class Recorded:
    """A program that an abstract run met.

    alike: of all programs of the run that were compiled, by structure. runs: how often. live: the most bytes of arrays that a core had when it ran, its
    arguments among them, by what there was else (`Run.most`). trace_seconds, lower_seconds, compile_seconds: of `compile`: by us and JAX to a
    jaxpr, by JAX to StableHLO, by XLA to an executable; 0 where another program of the same structure was compiled before.
    """

    program: Program
    signature: list[jax.ShapeDtypeStruct]
    alike: dict[str, Recorded]
    runs: int = 0
    live: dict[Standing, int] = field(default_factory=dict)
    jaxpr: Any = None
    trace_seconds: float = 0.0
    lower_seconds: float = 0.0
    compile_seconds: float = 0.0
    _compiled: Any = None

    @property
    def ops(self) -> int:
        """Nodes of the program's graph."""
        return len(self.program.graph.nodes)

    @functools.cached_property
    def structure(self) -> str:
        """The same for programs that do the same on other cores, such as equal stages of a pipeline (`cache_keys.structure`)."""
        return cache_keys.structure(self.program.spec)

    @property
    def mesh(self) -> Any:
        """The mesh of the ranks that it runs on, None without ranks."""
        labels = self.program.spec.labels
        return labels.mesh if isinstance(labels, RankLabels) else None

    def results_lie(self) -> list[Any] | None:
        """Of an annotated program, how each result lies, as it is handed over: where nothing was asked for XLA decides, so that it is compiled."""
        if not isinstance(self.program.spec.labels, AnnotatedLabels):
            return None
        return list(jax.tree.leaves(self.compile(QUICK).output_shardings))

    @property
    def compiled(self) -> bool:
        """Whether it has been compiled, or another one of its structure for it."""
        return self._compiled is not None

    def compile(self, options: dict[str, Any] | None = None) -> Any:
        """Trace, lower and compile, once for all programs of this structure; the executable. options: XLA's, for `jax.stages.Lowered.compile`."""
        if self._compiled is not None:
            return self._compiled
        other = self.alike.setdefault(self.structure, self)
        if other is not self:
            self._compiled, self.jaxpr = other.compile(options), other.jaxpr
            return self._compiled
        started = time.perf_counter()
        with _compat.enable_x64():
            traced = self.program.jitted.trace(*self.signature)
            at = time.perf_counter()
            self.trace_seconds, started = at - started, at
            self.jaxpr = traced.jaxpr
            lowered = traced.lower()
            at = time.perf_counter()
            self.lower_seconds, started = at - started, at
            self._compiled = lowered.compile(compiler_options=options)
        self.compile_seconds = time.perf_counter() - started
        return self._compiled


class Standing(NamedTuple):
    """What there is of a training script's tensors at a time. state: optimizers have their state; gradients: parameters have gradients."""

    state: bool = True
    gradients: bool = True


class Training(Protocol):
    """Follows the optimizers and gradients of a script: they come into being while it runs."""

    def standing(self, mesh: Any) -> Standing:
        """What there is now; gradients on the mesh of a place."""

    def state_bytes(self, mesh: Any) -> int:
        """Bytes of the optimizers' state on a core of the mesh of a place, with what lies on all cores."""


@dataclass
class Run:
    """An abstract run.

    values: what reading a value does, one of `VALUES`. programs: met so far, by identity. live: the arrays that there are. training: None if nobody
    follows it.
    """

    values: str = "error"
    programs: dict[int, Recorded] = field(default_factory=dict)
    live: Live = field(default_factory=Live)
    training: Training | None = None
    _alike: dict[str, Recorded] = field(default_factory=dict)
    _session: session.Session | None = None
    _left: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def results(self, program: Program, args: Sequence[Any]) -> list[AbstractArray]:
        """For `Program.run`: what the program would give, in the order in which its function returns it. Nothing is traced, but annotated programs."""
        found = self.programs.get(id(program))
        if found is None:
            program.signature = _signature(program, args)  # for `Program.lowered`
            found = self.programs[id(program)] = Recorded(program, program.signature, self._alike)
        found.runs += 1
        standing = Standing() if self.training is None else self.training.standing(found.mesh)
        found.live[standing] = max(found.live.get(standing, 0), self.live.on(found.mesh))
        return program.spec.abstract_results(found.results_lie())

    def most(self, recorded: Recorded) -> tuple[int, bool]:
        """The most bytes of arrays that a core has when a program runs, and whether gradients are among them.

        In a first step programs run before optimizers have their state; in later steps that is there, so it counts.
        """
        missing = 0 if self.training is None else self.training.state_bytes(recorded.mesh)
        return max((live + (0 if there.state else missing), there.gradients) for there, live in recorded.live.items())

    def __post_init__(self) -> None:
        if self.values not in VALUES:
            raise ValueError(f"values={self.values!r} must be one of {', '.join(map(repr, VALUES))}")

    def start(self) -> None:
        """From now on tensors on xla are abstract on this thread. What was recorded before waits. Raises RuntimeError within another abstract run."""
        if abstract_arrays.active():
            raise RuntimeError("an abstract run is active already: leave its `with` block before another one starts")
        observers = tuple(one for one in session.current().observers if not one.reads_values)
        self._session = session.Session(observers, self)
        self._left.enter_context(session.activated(self._session))

    def stop(self) -> None:
        """Back to real values. Abstract tensors that are still around are lost, and say so when they are used. Programs that were compiled stay so."""
        from torch_bridge.mesh import sharding
        from torch_bridge.runtime import executor

        assert self._session is not None, "stop() before start()"
        try:
            executor.sync()
        finally:
            self._left.close()
            if sharding.forget_abstract_devices():
                executor.clear_cache()
            session.current().recent.extend(program for program in self._session.recent if program.begun)
            _forget()


def _is_abstract(held: Any) -> bool:
    return type(held) is AbstractArray or type(getattr(getattr(held, "stack", None), "array", None)) is AbstractArray


class _Gone:
    """In place of the segment of a tensor whose run has ended (`errors.DeadTensorError`)."""

    lost = (
        "this xla tensor was made in an abstract run that has ended: it had a shape and no value. Make it again outside the `with` block."
    )
    deferred = known = None


_GONE = _Gone()


def _forget() -> None:
    """Mark every storage that holds an abstract array as lost."""
    from torch_bridge.ir.segment import Storage

    for storage in (x for x in gc.get_objects() if type(x) is Storage and _is_abstract(x.held)):
        storage.array, storage.segment, storage.vid = None, _GONE, 0
