"""Where the values of several ranks live: one global `jax.Array` per storage, on a mesh with one device per rank.

A value that all ranks share is replicated. One that varies over mesh axes is sharded over them: every rank's block is its own value. The
`PartitionSpec` says along which dim the blocks lie side by side in the global view (dim 0 unless somebody chose another); ranks compute with their
block alone, so that choice is a label, not a cost.
"""

from __future__ import annotations

import functools
import math
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from torch_bridge import _compat
from torch_bridge.mesh import abstract_arrays, watch, world

Axes = frozenset[str]
NONE: Axes = frozenset()
REPLICATED = PartitionSpec()

_said = False
_abstract_epochs: set[int] = set()
_MOST_PROVIDED = 64
"""Virtual devices that an abstract run has JAX start with: worlds after it may be as large."""


def active() -> bool:
    """True if the world has several ranks: values then live on a mesh."""
    now = world.current()
    return now.size > 1 or now.within is not None


def mesh() -> Mesh:
    """The mesh of the current world: axes outermost first. Rank r computes on JAX's device r, wherever that stands on the mesh."""
    return _laid_out(world.current().epoch)[0]


def forget_abstract_devices() -> bool:
    """After an abstract run: whether the ranks of the current world lay on devices that are none of JAX's. From now on they do not."""
    epoch = world.current().epoch
    if epoch not in _abstract_epochs:
        return False
    _abstract_epochs.discard(epoch)
    _laid_out.cache_clear()
    return True


def device_of(rank: int) -> Any:
    """The JAX device that a rank computes on."""
    return _laid_out(world.current().epoch)[1][rank]


def parts() -> dict[Any, world.World]:
    """Parts of the current mesh that have been asked for (`part`), with their ranks as a world of their own."""
    return _PARTS.get(world.current().epoch, {})


def part(axis: str, index: int) -> Mesh:
    """The part of the mesh with this index along an axis: a mesh with the same axes, that one of size 1."""
    known = _PARTS.setdefault(world.current().epoch, {})
    found = next((mesh for mesh, narrow in known.items() if narrow.at == {axis: index}), None)
    if found is not None:
        return found
    for epoch in [e for e in _PARTS if e != world.current().epoch and not _PARTS[e]]:
        del _PARTS[epoch]
    whole, devices = _laid_out(world.current().epoch)
    found = Mesh(np.take(whole.devices, [index], axis=whole.axis_names.index(axis)), whole.axis_names)
    narrow = world.narrowed(axis, index)
    _WHOLE[found] = whole, axis
    _NARROWED[narrow.epoch] = found, devices
    known[found] = narrow  # last: what was interrupted is done again
    return found


_PARTS: dict[int, dict[Any, world.World]] = {}
"""By epoch of a world."""
_WHOLE: dict[Any, tuple[Mesh, str]] = {}
"""By part of a mesh, of this world's or an earlier one's: the mesh that it is a part of, and along which axis."""
_NARROWED: dict[int, tuple[Mesh, Sequence[Any]]] = {}
"""By epoch of a narrowed world: its mesh, and the devices of all ranks by rank."""


@functools.lru_cache(maxsize=32)
def _laid_out(epoch: int) -> tuple[Mesh, Sequence[Any]]:
    """The current world's mesh, and its devices by rank; asked for with every array, so kept for a layout."""
    if epoch in _NARROWED:
        return _NARROWED[epoch]
    now = world.current()
    devices = _devices(now)
    placed = np.array([devices[r] for r in now.order])
    return Mesh(placed.reshape(tuple(now.axes.values())), tuple(now.axes)), devices


_asking = threading.RLock()
"""Held while JAX starts: a loader's thread and the script may both need its devices first."""


def _devices(of: world.World) -> Sequence[Any]:
    """One device for each rank: real ones if there are enough, else virtual CPU devices."""
    with _asking:
        return _found_devices(of)


def _found_devices(of: world.World) -> Sequence[Any]:
    global _said
    here = len(of.hosted)
    if of.processes > 1:
        from torch_bridge.mesh import processes

        processes.start(of)
    elif abstract_arrays.active() and not (_compat.jax_started() and len(jax.devices()) >= of.size):
        _compat.provision_cpu_devices(min(here, _MOST_PROVIDED))  # for the worlds after the run
        _abstract_epochs.add(of.epoch)
        return abstract_arrays.devices(of.size)
    elif not _compat.jax_started():
        _compat.provision_cpu_devices(here)
    found = jax.devices()
    if len(found) < of.size and found[0].platform != "cpu":
        found = jax.devices("cpu")
    if len(found) < of.size:
        raise RuntimeError(
            f"the world has {of.size} ranks, but JAX started with {len(found)} {found[0].platform} device(s) in this process, and their number cannot change "
            f"any more. Ask for the world before the first tensor goes to xla: {world.KNOB}."
        )
    if not _said:
        _said = True
        kind = "virtual CPU devices" if found[0].platform == "cpu" else f"{found[0].device_kind} devices"
        if of.first_here:
            sys.stderr.write(f"nxd_jax: {of.size} ranks in {of.processes} process(es), on {of.size} {kind}\n")
    return found[: of.size]


# -- labels ---------------------------------------------------------------------------------------


def axes_of(spec: PartitionSpec) -> Axes:
    """The axes that a label splits over."""
    return frozenset(a for part in spec if part is not None for a in (part if isinstance(part, tuple) else (part,)))


class HasSharding(Protocol):
    """A JAX array, or what stands for one."""

    @property
    def sharding(self) -> Any: ...


def spec_of(array: HasSharding) -> PartitionSpec:
    """The label of an array; one made before there were several ranks is the same for all."""
    return array.sharding.spec if isinstance(array.sharding, NamedSharding) else REPLICATED


def label(array: object) -> PartitionSpec | None:
    """The label of an array on the current mesh or a part of it; None for any other, and without an array."""
    found = getattr(array, "sharding", None)
    return found.spec if isinstance(found, NamedSharding) and (found.mesh == mesh() or found.mesh in parts()) else None


def ordered(axes: Iterable[str]) -> tuple[str, ...]:
    """Axis names outermost first, those of size 1 left out."""
    chosen = frozenset(axes)
    return tuple(a for a, n in world.current().axes.items() if a in chosen and n > 1)


Cuts = Mapping[int, Iterable[str]]
"""Mesh axes by the dim along which blocks that differ over them lie side by side in the global array."""


def spec_for(axes: Iterable[str] | Cuts, dim: int = 0) -> PartitionSpec:
    """The label of a value that varies over axes, its blocks side by side along `dim`; or along several dims, each with axes of its own."""
    cuts = axes if isinstance(axes, Mapping) else {dim: axes}
    named = {d: names for d, own in cuts.items() if (names := ordered(own))}
    if not named:
        return REPLICATED
    parts = [named.get(d) for d in range(max(named) + 1)]
    return PartitionSpec(*[names[0] if names is not None and len(names) == 1 else names for names in parts])


def count(part: object) -> int:
    """Blocks along a dim with this entry of a label."""
    sizes = world.current().axes
    return math.prod(sizes[a] for a in (part if isinstance(part, tuple) else (part,))) if part is not None else 1


def global_shape(local: Sequence[int], spec: PartitionSpec) -> tuple[int, ...]:
    """The shape of the global array whose blocks have a local shape. A varying number becomes a vector."""
    shape = list(local) if local or not axes_of(spec) else [1]
    for dim, part in enumerate(spec):
        shape[dim] *= count(part)
    return tuple(shape)


def sharding(spec: PartitionSpec) -> NamedSharding:
    return named(mesh(), spec)


@functools.lru_cache(maxsize=4096)
def named(mesh: Mesh, spec: PartitionSpec) -> NamedSharding:
    """`NamedSharding`, the same object each time: JAX keeps what it works out for one on that."""
    return NamedSharding(mesh, spec)


# -- arrays ---------------------------------------------------------------------------------------


def from_blocks(blocks: Sequence[np.ndarray], spec: PartitionSpec) -> jax.Array:
    """A global array from the hosted ranks' own values, in rank order (blocks that must agree are not compared)."""
    target = sharding(spec)
    local = blocks[0].shape
    if any(b.shape != local for b in blocks):
        raise ValueError(f"ranks must have tensors of one shape, got {sorted({tuple(b.shape) for b in blocks})}")
    if abstract_arrays.active():
        return abstract_arrays.blocks(local, blocks[0].dtype, spec)
    devices = [device_of(r) for r in world.current().hosted]
    if not local and axes_of(spec):
        blocks = [b.reshape(1) for b in blocks]
    arrays = [jax.device_put(b, d) for b, d in zip(blocks, devices, strict=True)]
    return jax.make_array_from_single_device_arrays(global_shape(local, spec), target, arrays)


def replicated(host: np.ndarray) -> jax.Array:
    """The same value on every rank."""
    if world.is_local():
        return _compat.put_replicated(host, sharding(REPLICATED))
    return from_blocks([host] * len(world.current().hosted), REPLICATED)


def filled(host: np.ndarray, spec: PartitionSpec) -> jax.Array:
    """A global array with this label, all blocks the same."""
    return from_blocks([host] * len(world.current().hosted), spec)


def blocks(array: jax.Array, local: Sequence[int]) -> list[np.ndarray]:
    """The hosted ranks' own values of a global array, in rank order. Of one on a part of the mesh: of the rank there that stands for each."""
    by_device = {s.device: s.data for s in array.addressable_shards}
    if not isinstance(array.sharding, NamedSharding):
        return [np.asarray(array)] * len(world.current().hosted)
    try:
        return [np.asarray(by_device[_device_of(array, r)]).reshape(tuple(local)) for r in world.current().hosted]
    except jax.errors.JaxRuntimeError as error:
        raise watch.explain(error) or error from error


def _device_of(array: jax.Array, rank: int) -> Any:
    """The device with a rank's block of an array: its own, or that of the rank of a part of the mesh with the same place along the other axes."""
    lies = array.sharding
    known = _WHOLE.get(lies.mesh) if isinstance(lies, NamedSharding) else None
    own = device_of(rank)
    if known is None or not isinstance(lies, NamedSharding):
        return own
    whole, axis = known
    (at,) = np.argwhere(whole.devices == own)
    at[whole.axis_names.index(axis)] = 0
    return lies.mesh.devices[tuple(at)]


def first_block(array: jax.Array, local: Sequence[int]) -> np.ndarray:
    """The first hosted rank's own value."""
    return block(array, world.first(), local)


def block(array: jax.Array, rank: int, local: Sequence[int]) -> np.ndarray:
    """A hosted rank's own value."""
    if not isinstance(array.sharding, NamedSharding):
        return np.asarray(array)
    if array.sharding.is_fully_replicated:
        return np.asarray(array.addressable_shards[0].data).reshape(tuple(local))
    device = _device_of(array, rank)
    shard = next(s for s in array.addressable_shards if s.device == device)
    return np.asarray(shard.data).reshape(tuple(local))


def adopt(array: jax.Array, local: Sequence[int]) -> jax.Array:
    """The same values on the current mesh (made before the ranks were laid out on these axes, or before there were several).

    What lies on a part of it stays there; what lies on a part of an earlier mesh comes to all ranks.
    """
    now = mesh()
    old = array.sharding
    if isinstance(old, NamedSharding) and (old.mesh == now or old.mesh in parts()):
        return array
    if isinstance(array, abstract_arrays.AbstractArray):
        return abstract_arrays.adopted(array, local)
    array = alone(array)
    if isinstance(old, NamedSharding) and old.mesh in _WHOLE:
        old = NamedSharding(_WHOLE[old.mesh][0], old.spec)
        with _compat.enable_x64():
            array = jax.device_put(array, old)
    if not isinstance(old, NamedSharding) or old.mesh.size != now.size:
        if isinstance(old, NamedSharding) and axes_of(old.spec):
            raise RuntimeError(f"a tensor that differs among {old.mesh.size} ranks cannot be used in a world of {now.size}")
        return replicated(first_block(array, local))
    spec = spec_for(_axes_now(old))
    return relabel(array, local, spec)


def alone(found: Any) -> Any:
    """What a storage holds, as an array: of a row (`rows`) one of its own, for whoever holds a row keeps its whole stack."""
    from torch_bridge.mesh.stacked_arrays import plain

    return plain(found)


def relabel(array: jax.Array, local: Sequence[int], spec: PartitionSpec) -> jax.Array:
    """The same blocks on the same devices under another label; nothing is copied."""
    if isinstance(array, abstract_arrays.AbstractArray):
        return abstract_arrays.blocks(local, array.dtype, spec)
    by_device = {s.device: s.data for s in array.addressable_shards}
    shape = tuple(local)
    inner = shape if shape or not axes_of(spec) else (1,)
    parts = [by_device[device_of(r)] for r in world.current().hosted]
    parts = [p if p.shape == inner else p.reshape(inner) for p in parts]
    return jax.make_array_from_single_device_arrays(global_shape(shape, spec), sharding(spec), parts)


def _axes_now(old: NamedSharding) -> tuple[str, ...]:
    """The current axes over which a value varies that was labelled on another mesh of the same ranks."""
    names, sizes = old.mesh.axis_names, old.mesh.devices.shape
    varied = axes_of(old.spec)
    index = np.zeros(sizes, dtype=np.int64)
    for k, name in enumerate(names):
        if name in varied:
            shape = [1] * len(sizes)
            shape[k] = sizes[k]
            index = index * sizes[k] + np.arange(sizes[k]).reshape(shape)
    block_on = dict(zip(old.mesh.devices.flat, index.reshape(-1).tolist(), strict=True))
    return world.axes_of_table([block_on[device_of(r)] for r in range(world.size())])
