"""Arrays that are one number throughout, made where they lie: no host array of their size, except for small ones, for which nothing is compiled."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding
from jax.typing import DTypeLike

from torch_bridge import _compat
from torch_bridge.mesh import sharding, spmd, world

MOST_ON_HOST = 1 << 20
"""Bytes up to which a fill is made on the host and moved."""


def full(size: Sequence[int], value: complex, dtype: DTypeLike, spec: PartitionSpec | NamedSharding | None = None) -> jax.Array:
    """An array of a rank's `size`. spec: how the blocks of the ranks lie, None: all ranks share one value. With annotations: the sharding."""
    host = np.asarray(value).astype(dtype)
    small = int(np.prod(size, dtype=np.int64)) * host.itemsize <= MOST_ON_HOST
    with _compat.enable_x64():
        if small:
            return _moved(np.full(size, host), spec)
        return _made(tuple(size), host, spec)


def _moved(host: np.ndarray, spec: PartitionSpec | NamedSharding | None) -> jax.Array:
    if spmd.active():
        return spmd.put(host, spec if isinstance(spec, NamedSharding) else spmd.replicated())
    assert not isinstance(spec, NamedSharding), spec
    if not sharding.active():
        return jax.device_put(host)
    return sharding.replicated(host) if spec is None else sharding.filled(host, spec)


def _made(size: tuple[int, ...], value: np.ndarray, spec: PartitionSpec | NamedSharding | None) -> jax.Array:
    if spmd.active():
        return _program(size, spec if isinstance(spec, NamedSharding) else spmd.replicated())(value)
    assert not isinstance(spec, NamedSharding), spec
    if not sharding.active():
        return _program(size, None)(value)
    spec = sharding.REPLICATED if spec is None else spec
    target, shape = sharding.sharding(spec), sharding.global_shape(size, spec)
    if world.is_local():
        return _program(shape, target)(value)
    # A program on the whole mesh would need all processes at the same moment.
    blocks = [_program(size, SingleDeviceSharding(sharding.device_of(r)))(value) for r in world.current().hosted]
    return jax.make_array_from_single_device_arrays(shape, target, blocks)


@functools.lru_cache(maxsize=256)
def _program(shape: tuple[int, ...], place: Any) -> Callable[[np.ndarray], jax.Array]:
    def fill(value: jax.Array) -> Any:
        return jnp.broadcast_to(value, shape)

    return jax.jit(fill) if place is None else jax.jit(fill, out_shardings=place)
