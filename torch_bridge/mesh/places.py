"""Places: parts of the mesh on which tensors lie and programs run, such as the cores of a pipeline stage.

A place has the ranks with one index along an axis of the world's mesh. Its own mesh has the same axes, that one of size 1, so labels mean the same on both.
An array lies at a place, or on the whole mesh; one on the whole mesh is at every place, too.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from torch_bridge import _compat
from torch_bridge.mesh import abstract_arrays, sharding, world
from torch_bridge.mesh.abstract_arrays import AbstractArray


class Place(NamedTuple):
    """Where nodes run. name: for messages, and to tell two places on one mesh apart; mesh: their devices, None for the mesh of the world."""

    name: str = ""
    mesh: Mesh | None = None


HERE = Place()
"""The mesh of the world."""


def along(axis: str, index: int) -> Place:
    """The place of the ranks with this index along an axis of the mesh. Raises ValueError for one that is not there."""
    sizes = world.current().axes
    if not 0 <= index < sizes.get(axis, 0):
        raise ValueError(f"no ranks at index {index} of axis {axis!r} of the mesh {sizes}")
    return _named(sharding.part(axis, index), axis, index)


def hosted(axis: str) -> list[Place]:
    """The places along an axis of which this process hosts ranks, in order."""
    mine = world.current().hosted
    return [along(axis, index) for index in sorted({world.coordinates(axis)[r] for r in mine})]


def axis_of(place: Place) -> str:
    """The axis that a place has one index of."""
    narrow = ranks(place.mesh)
    assert narrow is not None, place
    (axis,) = narrow.at
    return axis


@functools.lru_cache(maxsize=256)
def _named(mesh: Mesh, axis: str, index: int) -> Place:
    return Place(f"{axis} {index}", mesh)


def in_use() -> bool:
    """Whether anything may lie at a place of the current mesh."""
    return sharding.active() and bool(sharding.parts())


def of(array: Any) -> Place | None:
    """The place that an array lies at; None on the whole mesh, and for an array of no mesh or an earlier one."""
    lies = array.sharding
    narrow = sharding.parts().get(lies.mesh) if type(lies) is NamedSharding else None
    if narrow is None:
        return None
    ((axis, index),) = narrow.at.items()
    return _named(lies.mesh, axis, index)


def of_all(arrays: Iterable[Any]) -> tuple[Place | None, ...]:
    """`of` each."""
    known = {mesh: _named(mesh, *next(iter(narrow.at.items()))) for mesh, narrow in sharding.parts().items()}
    lying = (getattr(array, "sharding", None) for array in arrays)
    return tuple(known.get(lies.mesh) if type(lies) is NamedSharding else None for lies in lying)


def ranks(mesh: Any) -> world.World | None:
    """The ranks of a place, by its mesh, as a world of their own; None for the mesh of the world."""
    return sharding.parts().get(mesh)


def at(place: Place | None) -> contextlib.AbstractContextManager[None]:
    """A block in which arrays are made at a place (None: on the whole mesh)."""
    return contextlib.nullcontext() if place is None or place.mesh is None else world.taken_for(sharding.parts()[place.mesh])


def project(spec: PartitionSpec, narrow: world.World) -> PartitionSpec:
    """How an array lies at a place that lies like this on the whole mesh."""
    if not sharding.axes_of(spec) & narrow.at.keys():
        return spec
    kept = []
    for part in spec:
        names = tuple(a for a in (part if isinstance(part, tuple) else (part,)) if a is not None and a not in narrow.at)
        kept.append(names if len(names) > 1 else names[0] if names else None)
    while kept and kept[-1] is None:
        kept.pop()
    return PartitionSpec(*kept)


def label_at(label: PartitionSpec | None, place: Place) -> PartitionSpec:
    """How a value lies at a place that lies like this where it was computed (None: without ranks)."""
    narrow = None if place.mesh is None else ranks(place.mesh)
    found = sharding.REPLICATED if label is None else label
    return found if narrow is None else project(found, narrow)


def put(array: Any, mesh: Mesh) -> Any:
    """An array, or numbers of the host, on the mesh of a place or of the world.

    From the whole mesh nothing is copied: the blocks are those that the place's ranks have. From a place, all ranks of the world get the value of theirs
    that lies at the place. Raises RuntimeError for an array of other processes.
    """
    lies = getattr(array, "sharding", None)
    if not isinstance(lies, NamedSharding):
        return _everywhere(array, mesh)
    if lies.mesh == mesh:
        return array
    narrow = ranks(mesh)
    whole = narrow is not None and lies.mesh == sharding.mesh()
    spec = project(lies.spec, narrow) if narrow is not None and whole else lies.spec
    target = sharding.named(mesh, spec)
    sizes = mesh.shape
    shape = tuple(n // blocks_along(old, lies.mesh.shape) * blocks_along(new, sizes) for n, old, new in _dims(array.shape, lies.spec, spec))
    if isinstance(array, AbstractArray):
        return AbstractArray(shape, array.dtype, target, array.host if shape == tuple(array.shape) else None)
    if not whole:
        if not array.is_fully_addressable:
            raise RuntimeError(
                "a value of other processes' ranks is needed here: it lies on a pipeline stage that this process has no part of"
            )
        if narrow is not None and lies.mesh.size == mesh.size:
            return _compat.moved([array], [target])[0]
        with _compat.enable_x64():
            return jax.device_put(array, target)
    return _PARTS.of(array, target, shape)


def put_all(arrays: Sequence[Any], mesh: Mesh) -> list[Any]:
    """`put` each, those that lie at other places of as many ranks in one call of JAX's."""
    parts = sharding.parts()
    lying = [array.sharding for array in arrays]
    if mesh in parts and all(map(_is_of_process, arrays)) and all(_is_at(lies, parts, mesh) for lies in lying):
        return _compat.moved(arrays, [sharding.named(mesh, lies.spec) for lies in lying])
    return [put(array, mesh) for array in arrays]


def _is_of_process(array: Any) -> bool:
    return isinstance(array, jax.Array) and array.is_fully_addressable


def _is_at(lies: Any, parts: Mapping[Mesh, Any], mesh: Mesh) -> bool:
    """Whether an array lies at another place of as many ranks as that of a mesh."""
    return type(lies) is NamedSharding and lies.mesh in parts and lies.mesh != mesh and lies.mesh.size == mesh.size


class _Parts:
    """What lies at places of arrays on the whole mesh, as long as these are there: micro-batches and passes ask for the same masks over and over."""

    def __init__(self) -> None:
        self._found: dict[int, tuple[weakref.ref[Any], dict[NamedSharding, Any]]] = {}

    def of(self, array: Any, target: NamedSharding, shape: tuple[int, ...]) -> Any:
        """The blocks of an array that the devices of a place have; nothing is copied."""
        key = id(array)
        known = self._found.get(key)
        if known is None or known[0]() is not array:
            known = self._found[key] = weakref.ref(array, lambda _: self._found.pop(key, None)), {}
        found = known[1].get(target)
        if found is None or found.is_deleted():
            by_device = {shard.device: shard.data for shard in array.addressable_shards}
            blocks = [by_device[device] for device in target.mesh.devices.flat if device in by_device]
            found = known[1][target] = jax.make_array_from_single_device_arrays(shape, target, blocks)
        return found


_PARTS = _Parts()


_NUMBERS: collections.OrderedDict[Any, Any] = collections.OrderedDict()
_KEPT_NUMBERS = 256
"""Arrays of numbers that `numbers` keeps: a pipeline's passes ask for the same ones over and over."""


def numbers(value: np.ndarray, mesh: Mesh) -> Any:
    """Few numbers of the host, the same for all ranks of a mesh; nobody may take them over. Those that were asked for last are kept on the devices."""
    if abstract_arrays.active() or value.nbytes > 4096:
        return _everywhere(value, mesh)
    key = mesh, value.dtype.str, value.shape, value.tobytes()
    found = _NUMBERS.get(key)
    if found is None:
        found = _NUMBERS[key] = _everywhere(value, mesh)
        if len(_NUMBERS) > _KEPT_NUMBERS:
            _NUMBERS.popitem(last=False)
    else:
        _NUMBERS.move_to_end(key)
    return found


def _everywhere(value: Any, mesh: Mesh) -> Any:
    """Numbers of the host, or an array that lies on no mesh, the same for all ranks of a mesh."""
    target = sharding.named(mesh, sharding.REPLICATED)
    if isinstance(value, AbstractArray):
        return AbstractArray(value.shape, value.dtype, target, value.host)
    if abstract_arrays.active():
        return jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=target)
    if world.is_local():
        if isinstance(value, np.ndarray):
            return _compat.put_replicated(value, target)
        with _compat.enable_x64():
            return jax.device_put(value, target)
    here = [device for device in mesh.devices.flat if device.process_index == jax.process_index()]
    with _compat.enable_x64():
        return jax.make_array_from_single_device_arrays(value.shape, target, [jax.device_put(value, device) for device in here])


def _dims(shape: tuple[int, ...], old: PartitionSpec, new: PartitionSpec) -> list[tuple[int, Any, Any]]:
    pad = [None] * len(shape)
    return list(zip(shape, [*old, *pad], [*new, *pad], strict=False))


def blocks_along(part: Any, sizes: Mapping[str, int]) -> int:
    """Blocks along a dim with this entry of a label, on a mesh with axes of these sizes."""
    found = 1
    for name in part if isinstance(part, tuple) else (part,):
        found *= 1 if name is None else sizes[name]
    return found
