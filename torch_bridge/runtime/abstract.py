"""Abstract runs: tensors on xla have shapes, dtypes and a place on the mesh, and no values. Programs are recorded and never executed.

While a `Run` is active, `AbstractArray`s stand where JAX arrays would: what is moved to xla becomes one, and so does every result of a program, whose
shape follows from its graph alone. So weights are not allocated, and a world may have more ranks than JAX has devices (`devices`). A program is traced
and compiled only when somebody asks what it needs (`Recorded.compile`). `nxd_jax.abstract_run` is the front of this.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from torch_bridge import _compat
from torch_bridge.compiler.program import Program
from torch_bridge.ir import dtypes
from torch_bridge.mesh import abstract_arrays
from torch_bridge.mesh.abstract_arrays import KEPT, VALUES, AbstractArray, everywhere
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
    """The inputs as `jax.jit` is to see them; packed numbers and draws are the same on all ranks."""
    shared = None if program.spec.labels is None else everywhere()
    return [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=None if shared is None else getattr(a, "sharding", shared)) for a in args]


@dataclass
class Recorded:
    """A program that an abstract run met. runs: how often. trace_seconds, lower_seconds, compile_seconds: of `compile`: by us and JAX to a jaxpr, by JAX
    to StableHLO, by XLA to an executable.
    """

    program: Program
    signature: list[jax.ShapeDtypeStruct]
    runs: int = 0
    jaxpr: Any = None
    trace_seconds: float = 0.0
    lower_seconds: float = 0.0
    compile_seconds: float = 0.0
    _compiled: Any = None

    @property
    def ops(self) -> int:
        """Nodes of the program's graph."""
        return len(self.program.graph.nodes)

    def compile(self, options: dict[str, Any] | None = None) -> Any:
        """Trace, lower and compile, once; the executable. options: XLA's, for `jax.stages.Lowered.compile`."""
        if self._compiled is not None:
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


@dataclass
class Run:
    """An abstract run. values: what reading a value does, one of `VALUES`. programs: met so far, by identity."""

    values: str = "error"
    programs: dict[int, Recorded] = field(default_factory=dict)
    _session: session.Session | None = None
    _left: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def results(self, program: Program, args: Sequence[Any]) -> list[AbstractArray]:
        """For `Program.run`: what the program would give, in the order in which its function returns it. Nothing is traced."""
        found = self.programs.get(id(program))
        if found is None:
            program.signature = _signature(program, args)  # for `Program.lowered`
            found = self.programs[id(program)] = Recorded(program, program.signature)
        found.runs += 1
        return program.spec.abstract_results()

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
    deferred = None


_GONE = _Gone()


def _forget() -> None:
    """Mark every storage that holds an abstract array as lost."""
    from torch_bridge.ir.segment import Storage

    for storage in (x for x in gc.get_objects() if type(x) is Storage and _is_abstract(x.held)):
        storage.array, storage.segment, storage.vid = None, _GONE, 0
