"""Abstract runs: tensors on xla have shapes, dtypes and a place on the mesh, and no values. Programs are recorded and never executed.

While a `Run` is active, `AbstractArray`s stand where JAX arrays would: what is moved to xla becomes one, and so does every result of a program, whose
shape follows from its graph alone. So weights are not allocated, and a world may have more ranks than JAX has devices (`devices`). A program is traced
and compiled only when somebody asks what it needs (`Recorded.compile`). `nxd_jax.abstract_run` is the front of this.
"""

from __future__ import annotations

import functools
import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from torch_bridge import _compat, dtypes, source

KEPT = 1 << 16
"""Elements up to which what a script moves to xla keeps its values: a few token ids or a mask that Python looks at later."""

VALUES = ("error", "zeros")

RUN: Run | None = None
"""The abstract run that is active."""


class AbstractValueError(RuntimeError):
    """A script asked for the value of a tensor in an abstract run."""

    @classmethod
    def here(cls, shape: Sequence[int], dtype: Any) -> AbstractValueError:
        return cls(
            f"the value of a tensor ({np.dtype(dtype).name}{list(shape)}) is asked for at {source.user_line(2)}, but in an abstract run tensors on xla have "
            "shapes and no values. Leave out what reads values there (.item(), .cpu(), print, saving, a Python branch on a tensor), or choose "
            "abstract_run(values='zeros'), which gives zeros."
        )


def active() -> bool:
    """Whether tensors on xla are abstract now."""
    return RUN is not None


class AbstractArray:
    """What a `jax.Array` is without its values: global `shape`, `dtype` (a numpy dtype) and `sharding`. `host`: the values, of a few small inputs.

    Reading the values of any other raises `AbstractValueError`, or gives zeros if the run says so.
    """

    __slots__ = ("__weakref__", "dtype", "host", "shape", "sharding")

    def __init__(self, shape: Sequence[int], dtype: Any, sharding: Any, host: np.ndarray | None = None):
        self.shape = tuple(shape)
        self.dtype = np.dtype(dtype)
        self.sharding = sharding
        self.host = host if host is not None and host.size <= KEPT else None

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def core_bytes(self) -> int:
        """Bytes that one device would hold."""
        return int(np.prod(self.sharding.shard_shape(self.shape), dtype=np.int64)) * self.dtype.itemsize

    def is_deleted(self) -> bool:
        return False

    def is_ready(self) -> bool:
        return True

    def block_until_ready(self) -> AbstractArray:
        return self

    @property
    def addressable_shards(self) -> list[_Block]:
        """What each device would hold."""
        block = AbstractArray(self.sharding.shard_shape(self.shape), self.dtype, self.sharding, self.host)
        return [_Block(device, block) for device in self.sharding.addressable_devices]

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        if self.host is not None:
            return self.host.copy()
        if RUN is None or RUN.values == "error":
            raise AbstractValueError.here(self.shape, self.dtype)
        return np.zeros(self.shape, self.dtype)

    def __repr__(self) -> str:
        return f"AbstractArray({self.dtype.name}{list(self.shape)}, {self.sharding})"


@dataclass(frozen=True)
class _Block:
    """One of `addressable_shards`."""

    device: Any
    data: AbstractArray


# -- what stands for arrays ------------------------------------------------------------------------


def _everywhere() -> Any:
    """The sharding of a value that all ranks share."""
    from torch_bridge import sharding

    return sharding.sharding(sharding.REPLICATED) if sharding.active() else SingleDeviceSharding(jax.devices()[0])


def uploaded(t: Any) -> Any:
    """For `transfer.to_array`: a CPU tensor, or one on "meta", as an array that all ranks share."""
    from torch_bridge import numerics, transfer

    host = numerics.uploaded(transfer.to_numpy(t)).copy() if t.device.type != "meta" and t.numel() <= KEPT else None
    return AbstractArray(t.shape, dtypes.to_jax(t.dtype), _everywhere(), host)


def blocks(size: Sequence[int], dtype: Any, spec: PartitionSpec) -> Any:
    """For `sharding.from_blocks` and what leads to it: the array whose blocks have this local size, labelled `spec`."""
    from torch_bridge import sharding

    return AbstractArray(sharding.global_shape(size, spec), dtype, sharding.sharding(spec))


def constant(size: Sequence[int], dtype: Any, spec: PartitionSpec | None) -> Any:
    """For `hoisting`: state that starts full of one number, as an input of the step."""
    return AbstractArray(size, dtype, _everywhere()) if spec is None else blocks(size, dtype, spec)


def adopted(array: AbstractArray, local: Sequence[int]) -> AbstractArray:
    """For `sharding.adopt`: the array on the current mesh."""
    from torch_bridge import sharding

    now, old = sharding.mesh(), array.sharding
    if isinstance(old, NamedSharding) and old.mesh == now:
        return array
    if isinstance(old, NamedSharding) and sharding.axes_of(old.spec):
        return blocks(local, array.dtype, sharding.spec_for(sharding._axes_now(old)))
    return AbstractArray(local, array.dtype, _everywhere(), array.host)


@functools.lru_cache(maxsize=2)
def devices(count: int) -> tuple[Any, ...]:
    """That many CPU devices to compile for, whatever JAX has started with: a client of their own, which never executes anything."""
    from jaxlib import xla_client

    client: Any = xla_client.make_cpu_client(asynchronous=True, num_devices=count)
    return tuple(client.devices())


# -- programs --------------------------------------------------------------------------------------


def results(program: Any, args: Sequence[Any]) -> list[AbstractArray]:
    """For `Program.run`: what the program would give, in the order in which its function returns it. Nothing is traced."""
    assert RUN is not None
    found = RUN.programs.get(id(program))
    if found is None:
        program.signature = _signature(program, args)  # for `Program.lowered`
        found = RUN.programs[id(program)] = Recorded(program, program.signature)
    found.runs += 1
    return outputs(program)


def outputs(program: Any) -> list[AbstractArray]:
    """What comes out of each port of a program, in the order in which they leave: shapes and places, from its graph alone."""
    from torch_bridge import sharding

    metas = [node.meta["val"] for node in program._outputs()]
    shapes = [tuple(m.shape) for m in metas]
    ports = program.ports
    if program.ranks is not None:
        shapes = [sharding.global_shape(shape, spec) for shape, spec in zip(shapes, program.ranks.outputs, strict=True)]
        places = [sharding.sharding(spec) for spec in ports.output_specs(program.ranks.outputs)]
    else:
        places = [_everywhere()] * len(ports.order)
    made = []
    for at, place in zip(ports.order, places, strict=True):
        first = ports.outputs[at][0]
        rows = (len(ports.outputs[at]),) if ports.stacked_outputs[at] else ()
        made.append(AbstractArray((*rows, *shapes[first]), dtypes.to_jax(metas[first].dtype), place))
    return made


def _signature(program: Any, args: Sequence[Any]) -> list[jax.ShapeDtypeStruct]:
    """The inputs as `jax.jit` is to see them; packed numbers and draws are the same on all ranks."""
    shared = None if program.ranks is None else _everywhere()
    return [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=None if shared is None else getattr(a, "sharding", shared)) for a in args]


@dataclass
class Recorded:
    """A program that an abstract run met. runs: how often. trace_seconds, lower_seconds, compile_seconds: of `compile`: by us and JAX to a jaxpr, by JAX
    to StableHLO, by XLA to an executable.
    """

    program: Any
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
    _outside: tuple[list[Any], set[int]] = ([], set())

    def __post_init__(self) -> None:
        if self.values not in VALUES:
            raise ValueError(f"values={self.values!r} must be one of {', '.join(map(repr, VALUES))}")

    def start(self) -> None:
        """From now on tensors on xla are abstract. What was recorded before runs first. Raises RuntimeError within another abstract run."""
        from torch_bridge import executor, hoisting

        global RUN
        if RUN is not None:
            raise RuntimeError("an abstract run is active already: leave its `with` block before another one starts")
        executor.sync()
        self._outside, hoisting._ONCE = (list(executor.CHECKS), hoisting._ONCE), set()
        executor.CHECKS.clear()  # they look at values
        RUN = self

    def stop(self) -> None:
        """Back to real values. Abstract tensors that are still around are lost, and say so when they are used. Programs that were compiled stay so."""
        from torch_bridge import executor, hoisting, sharding

        global RUN
        try:
            executor.sync()
        finally:
            RUN = None
            if sharding.forget_abstract_devices():
                executor.clear_cache()
            executor.CHECKS[:], hoisting._ONCE = self._outside
            compiled = [program for program in executor.RECENT if program.begun]
            executor.RECENT.clear()
            executor.RECENT.extend(compiled)
            _forget()


def _is_abstract(held: Any) -> bool:
    return type(held) is AbstractArray or type(getattr(getattr(held, "stack", None), "array", None)) is AbstractArray


class _Gone:
    """In place of the segment of a tensor whose run has ended (`errors.DeadTensorError`)."""

    lost = (
        "this xla tensor was made in an abstract run that has ended: it had a shape and no value. Make it again outside the `with` block."
    )


_GONE = _Gone()


def _forget() -> None:
    """Mark every storage that holds an abstract array as lost."""
    from torch_bridge.segment import Storage

    for storage in (x for x in gc.get_objects() if type(x) is Storage and _is_abstract(x.held)):
        storage.array, storage.segment, storage.vid = None, _GONE, 0
