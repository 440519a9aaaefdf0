"""Tensors at places of the mesh (`mesh.places`): where one lies, moving one, and calls on lists of tensors that lie at several.

An op runs where its inputs lie. A call that treats each entry of its lists by itself becomes one call for each place, so that nothing has to move.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import torch

from torch_bridge import _compat
from torch_bridge.ir import dtypes
from torch_bridge.ir.layout import layout
from torch_bridge.ir.segment import Segment, Storage
from torch_bridge.mesh import abstract_arrays, places, sharding, world
from torch_bridge.mesh.places import HERE, Place
from torch_bridge.passes import place_nodes
from torch_bridge.recorder import overlaps
from torch_bridge.recorder.schema import Info
from torch_bridge.recorder.tensor import XLATensor, make
from torch_bridge.runtime import executor, session


def place_of(t: torch.Tensor) -> Place | None:
    """The place that an xla tensor lies at, or will when it has been computed; None for the whole mesh."""
    found = _of_storage(t._storage)  # type: ignore[attr-defined]
    return None if found is HERE else found


def _of_storage(storage: Storage) -> Place | None:
    if storage.held is not None:
        return places.of(storage.held)
    if storage.facts is not None and storage.constant:
        return storage.facts.home
    segment = storage.segment
    if storage.vid < 0 or not isinstance(segment, Segment):
        return None
    followed = segment.followed
    if followed is None:
        followed = segment.followed = place_nodes.Inputs([])
    leaves: Any = followed.leaves
    leaves += places.of_all(segment.leaves[len(leaves) :])
    followed.follow(segment.nodes)
    return followed.of_value[storage.vid]


def compute_at(place: Place | None) -> None:
    """What is recorded until the next run is for a place (None: for all ranks): what reads nothing that lies at a place is computed there, too."""
    session.current().current.home = place


def moved(t: torch.Tensor, place: Place) -> XLATensor:
    """A new tensor with the values of an xla tensor, which are computed first, at a place (`HERE`: on the whole mesh). It carries no gradient."""
    assert isinstance(t, XLATensor)
    storage = t._storage
    executor.materialize(storage)
    new = Storage(storage.layout, fill=storage.fill)
    if storage.held is not None:
        new.array = _put(storage, place)
    elif place is not HERE:
        new.describe(home=place)
    new.lie_as(storage)
    return make(t._layout, new)


def move_(t: torch.Tensor, place: Place) -> None:
    """Move an xla tensor, which is computed first, with all that views its memory."""
    storage = t._storage  # type: ignore[attr-defined]
    executor.materialize(storage)
    if storage.held is not None:
        storage.array = _put(storage, place)
    else:
        storage.describe(home=None if place is HERE else place)


def array_at(t: torch.Tensor, place: Place) -> Any:
    """The array of an xla tensor that lies at a place, computed first. The tensor must have its memory for itself (`own`)."""
    storage = t._storage  # type: ignore[attr-defined]
    executor.materialize(storage)
    if storage.held is not None:
        return _put(storage, place)
    size = storage.layout.size
    with places.at(place), _compat.enable_x64():
        spec = sharding.REPLICATED if storage.spec is None else storage.spec
        return sharding.filled(np.full(size, storage.fill, dtypes.to_jax(storage.layout.dtype)), spec)


def arrays_at(arrays: Sequence[Any], place: Place) -> list[Any]:
    """What storages hold that lie at another place, at this one."""
    return places.put_all([sharding.alone(held) for held in arrays], sharding.mesh() if place.mesh is None else place.mesh)


def own(t: torch.Tensor) -> torch.Tensor:
    """An xla tensor with its memory for itself, which it shows as it lies; a copy (recorded) of one that is a view of more, or in another order."""
    assert isinstance(t, XLATensor)
    with torch.no_grad():
        return t.detach() if t._layout is t._storage.layout and t._layout.contiguous else t.contiguous().clone()


def from_array(array: Any, dtype: torch.dtype, size: Sequence[int]) -> XLATensor:
    """An xla tensor of an array that lies at a place. size: what each rank sees."""
    base = layout(tuple(size), None, 0, dtype)
    storage = Storage(base, array)
    storage.describe(spec=sharding.spec_of(array))
    return make(base, storage)


def joined(parts: Mapping[Any, torch.Tensor], axis: str) -> XLATensor:
    """One tensor on the whole mesh that differs along an axis, of one at each of its places that this process hosts (`places.hosted`).

    What a process computes at its own stage becomes its ranks' values; nothing is copied. Parts must have one shape and dtype; one that lies at no place
    has its values at the place that it is given for.
    """
    arrays = [array_at(own(t), place) for place, t in parts.items()]
    t = next(iter(parts.values()))
    size, dtype = tuple(t.shape), t.dtype
    spec = sharding.spec_for(frozenset([axis]).union(*(sharding.axes_of(a.sharding.spec) for a in arrays)))
    if abstract_arrays.active():
        return from_array(abstract_arrays.blocks(size, arrays[0].dtype, spec), dtype, size)
    by_device = {shard.device: shard.data for a in arrays for shard in a.addressable_shards}
    inner = size or (1,)
    with _compat.enable_x64():
        blocks = [by_device[sharding.device_of(r)] for r in world.current().hosted]
        blocks = [b if b.shape == inner else b.reshape(inner) for b in blocks]
        array = jax.make_array_from_single_device_arrays(sharding.global_shape(size, spec), sharding.sharding(spec), blocks)
    return from_array(array, dtype, size)


def for_ranks(t: torch.Tensor, groups: str) -> torch.Tensor:
    """What a collective takes for an xla tensor. groups: ranks, as recorded collectives name them.

    Where a process has ranks of one place alone (a pipeline stage, under torchrun), a tensor there is these ranks' own value, and a collective with ranks of
    other places works on that. In a process that has several places, it cannot be meant, and fails when it is compiled.
    """
    place = place_of(t) if places.in_use() and not world.is_local() else None
    if place is None:
        return t
    axis = places.axis_of(place)
    at = world.coordinates(axis)
    lists = json.loads(groups) if groups.startswith("[") else []
    crosses = axis in groups.split(",") or any(len({at[r] for r in group}) > 1 for group in lists)
    return joined({place: t}, axis) if crosses and len(places.hosted(axis)) == 1 else t


def _put(storage: Storage, place: Place) -> Any:
    array = sharding.adopt(sharding.alone(storage.held), storage.layout.size)
    return places.put(array, sharding.mesh() if place.mesh is None else place.mesh)


# -- lists ----------------------------------------------------------------------------------------


def groups(columns: Sequence[Sequence[Any]]) -> list[list[int]] | None:
    """The entries of lists of tensors that belong together, by the place they lie at; None if one call can do them all."""
    if not places.in_use():
        return None
    found: dict[Place | None, list[int]] = {}
    for k, entry in enumerate(zip(*columns, strict=True)):
        lying = {_of_storage(t._storage) for t in entry if isinstance(t, XLATensor)} - {None, HERE}
        found.setdefault(lying.pop() if len(lying) == 1 else HERE if lying else None, []).append(k)
    return list(found.values()) if len(found) > 1 else None


def by_place(record: Callable[..., Any], info: Info, args: Sequence[Any], kwargs: dict[str, Any] | None) -> Any:
    """What a call gives that treats the entries of its lists by itself, recorded once for each place; NotImplemented if one call can do it."""
    lists, count = _lists(info, args, kwargs)
    apart = groups([x for x in lists.values() if _of_tensors(x)]) if count > 1 else None
    return NotImplemented if apart is None else _in_parts(record, info, args, kwargs, apart)


def in_turn(record: Callable[..., Any], info: Info, args: Sequence[Any], kwargs: dict[str, Any] | None) -> Any:
    """The same for a call that writes, recorded for one entry after the other where one may write what another one reads or writes."""
    lists, count = _lists(info, args, kwargs)
    if count < 2:
        return NotImplemented
    written = {info.names[i] for i in info.mutated}
    tensors = [(name in written, x) for name, x in lists.items() if _of_tensors(x)]
    if not overlaps.between_entries([x for writes, x in tensors if writes], [x for writes, x in tensors if not writes]):
        return NotImplemented
    return _in_parts(record, info, args, kwargs, [[k] for k in range(count)])


def _lists(info: Info, args: Sequence[Any], kwargs: dict[str, Any] | None) -> tuple[dict[str, Any], int]:
    """The lists that a call treats entry by entry, by name, and how long they are."""
    given = dict(zip(info.names, args, strict=False)) | (kwargs or {})
    lists = {name: given[name] for name in info.lists if given.get(name)}
    count = max((len(x) for x in lists.values() if _of_tensors(x)), default=0)
    return {name: x for name, x in lists.items() if len(x) == count}, count


def _in_parts(
    record: Callable[..., Any], info: Info, args: Sequence[Any], kwargs: dict[str, Any] | None, apart: Sequence[Sequence[int]]
) -> Any:
    """A call recorded once for each of these groups of entries."""
    given = dict(zip(info.names, args, strict=False)) | (kwargs or {})
    lists, count = _lists(info, args, kwargs)
    results: list[Any] = [None] * count
    several: list[list[Any]] | None = None
    for places_of in apart:
        part = given | {name: [x[k] for k in places_of] for name, x in lists.items()}
        out = record(info.op, tuple(part[name] for name in info.names[: len(args)]), {name: part[name] for name in kwargs or ()})
        if isinstance(out, tuple) and out and isinstance(out[0], (list, tuple)):
            several = several or [[None] * count for _ in out]
            for column, part in zip(several, out, strict=True):
                for k, value in zip(places_of, part, strict=False):
                    column[k] = value
        elif out is not None:
            for k, value in zip(places_of, out, strict=True):
                results[k] = value
    if not info.n_returns:
        return None
    return results if several is None else tuple(several)


def _of_tensors(found: Sequence[Any]) -> bool:
    return isinstance(found[0], torch.Tensor)
