"""Tensors at places of the mesh (`mesh.places`): where one lies, moving one, and calls on lists of tensors that lie at several.

An op runs where its inputs lie. A call that treats each entry of its lists by itself becomes one call for each place, so that nothing has to move.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from torch_bridge.ir.segment import Segment, Storage
from torch_bridge.mesh import places, sharding
from torch_bridge.mesh.places import HERE, Place
from torch_bridge.passes import place_nodes
from torch_bridge.recorder.schema import Info
from torch_bridge.recorder.tensor import XLATensor, make
from torch_bridge.runtime import executor


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
    given = dict(zip(info.names, args, strict=False)) | (kwargs or {})
    lists = {name: given[name] for name in info.lists if given.get(name)}
    count = max((len(x) for name, x in lists.items() if _of_tensors(x)), default=0)
    lists = {name: x for name, x in lists.items() if len(x) == count}
    apart = groups([x for x in lists.values() if _of_tensors(x)]) if count > 1 else None
    if apart is None:
        return NotImplemented
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
