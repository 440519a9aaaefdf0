"""Abstract arrays: a shape, a dtype and a place on the mesh, and no values. They stand where JAX arrays would during an abstract run (`runtime.abstract`)."""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding
from jax.typing import DTypeLike

from torch_bridge import source
from torch_bridge.mesh import spmd_mode

KEPT = 1 << 16
"""Elements up to which what a script moves to xla keeps its values: a few token ids or a mask that Python looks at later."""

VALUES = ("error", "zeros")


class _Active(threading.local):
    """run: the abstract run of this thread's session (`runtime.abstract.Run`), or None."""

    run: Any = None


ACTIVE = _Active()


class AbstractValueError(RuntimeError):
    """A script asked for the value of a tensor in an abstract run."""

    @classmethod
    def here(cls, shape: Sequence[int], dtype: DTypeLike) -> AbstractValueError:
        return cls(
            f"the value of a tensor ({np.dtype(dtype).name}{list(shape)}) is asked for at {source.user_line(2)}, but in an abstract run tensors on xla have "
            "shapes and no values. Leave out what reads values there (.item(), .cpu(), print, saving, a Python branch on a tensor), or choose "
            "abstract_run(values='zeros'), which gives zeros."
        )


def active() -> bool:
    """Whether tensors on xla are abstract now."""
    return ACTIVE.run is not None


class AbstractArray:
    """What a `jax.Array` is without its values: global `shape`, `dtype` (a numpy dtype) and `sharding`. `host`: the values, of a few small inputs.

    Reading the values of any other raises `AbstractValueError`, or gives zeros if the run says so.
    """

    __slots__ = ("__weakref__", "_counted", "dtype", "host", "shape", "sharding")

    def __init__(self, shape: Sequence[int], dtype: DTypeLike, sharding: Any, host: np.ndarray | None = None, counted: bool = True):
        self.shape = tuple(shape)
        self.dtype = np.dtype(dtype)
        self.sharding = sharding
        self.host = host if host is not None and host.size <= KEPT else None
        self._counted = ACTIVE.run.live.add(self) if counted and ACTIVE.run is not None else None

    def __del__(self) -> None:
        if self._counted is not None:
            self._counted.remove()

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
        block = AbstractArray(self.sharding.shard_shape(self.shape), self.dtype, self.sharding, self.host, counted=False)
        return [_Block(device, block) for device in self.sharding.addressable_devices]

    def __array__(self, dtype: DTypeLike | None = None, copy: Any = None) -> np.ndarray:
        if self.host is not None:
            return self.host.copy()
        if ACTIVE.run is None or ACTIVE.run.values == "error":
            raise AbstractValueError.here(self.shape, self.dtype)
        return np.zeros(self.shape, self.dtype)

    def __repr__(self) -> str:
        return f"AbstractArray({self.dtype.name}{list(self.shape)}, {self.sharding})"


class Live:
    """How much memory of a core the abstract arrays take that somebody still has.

    of_mesh: bytes by the mesh that arrays lie on; None: on no mesh, so on every core.
    """

    def __init__(self) -> None:
        self.of_mesh: dict[Any, int] = {}
        self._sizes: dict[Any, int] = {}

    def add(self, array: AbstractArray) -> Counted:
        """Count an array until it is removed."""
        lies = array.sharding
        key = array.shape, array.dtype, lies
        size = self._sizes.get(key)
        if size is None:
            size = self._sizes[key] = array.core_bytes
        mesh = lies.mesh if isinstance(lies, NamedSharding) else None
        self.of_mesh[mesh] = self.of_mesh.get(mesh, 0) + size
        return Counted(self.of_mesh, mesh, size)

    def on(self, mesh: Any) -> int:
        """Bytes of a core of the mesh of a place (None: of the world): of arrays there, and of those that all cores have. With annotations each mesh has
        all cores."""
        from torch_bridge.mesh import sharding

        if spmd_mode.active():
            return sum(self.of_mesh.values())
        whole = sharding.mesh() if sharding.active() else None
        return sum(self.of_mesh.get(m, 0) for m in {mesh, whole, None})


class Counted(NamedTuple):
    """What an array adds to `Live`."""

    of_mesh: dict[Any, int]
    mesh: Any
    size: int

    def remove(self) -> None:
        """The array is gone."""
        self.of_mesh[self.mesh] -= self.size


@dataclass(frozen=True)
class _Block:
    """One of `addressable_shards`."""

    device: Any
    data: AbstractArray


# -- what stands for arrays ------------------------------------------------------------------------


def everywhere() -> Any:
    """The sharding of a value that all ranks share."""
    from torch_bridge.mesh import sharding

    return sharding.sharding(sharding.REPLICATED) if sharding.active() else SingleDeviceSharding(jax.devices()[0])


def blocks(size: Sequence[int], dtype: DTypeLike, spec: PartitionSpec) -> Any:
    """For `sharding.from_blocks` and what leads to it: the array whose blocks have this local size, labelled `spec`."""
    from torch_bridge.mesh import sharding

    return AbstractArray(sharding.global_shape(size, spec), dtype, sharding.sharding(spec))


def constant(size: Sequence[int], dtype: DTypeLike, spec: PartitionSpec | NamedSharding | None) -> Any:
    """For `hoist_constants`: state that starts full of one number, as an input of the step."""
    if isinstance(spec, NamedSharding):
        return AbstractArray(size, dtype, spec)
    return AbstractArray(size, dtype, everywhere()) if spec is None else blocks(size, dtype, spec)


def adopted(array: AbstractArray, local: Sequence[int]) -> AbstractArray:
    """For `sharding.adopt`: the array on the current mesh."""
    from torch_bridge.mesh import sharding

    now, old = sharding.mesh(), array.sharding
    if isinstance(old, NamedSharding) and old.mesh == now:
        return array
    if isinstance(old, NamedSharding) and sharding.axes_of(old.spec):
        return blocks(local, array.dtype, sharding.spec_for(sharding._axes_now(old)))
    return AbstractArray(local, array.dtype, everywhere(), array.host)


@functools.lru_cache(maxsize=2)
def devices(count: int) -> tuple[Any, ...]:
    """That many CPU devices to compile for, whatever JAX has started with: a client of their own, which never executes anything."""
    from jaxlib import xla_client

    client: Any = xla_client.make_cpu_client(asynchronous=True, num_devices=count)
    return tuple(client.devices())
