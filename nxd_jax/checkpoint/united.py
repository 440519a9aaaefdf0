"""Checkpoints of a pipeline whose stages are in several processes: what each process has, put together.

Each process has the names of its own stages. All agree on what the whole has; process 0 writes the index and what is no tensor.
"""

from __future__ import annotations

import dataclasses
import io
import itertools
import pickle
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import torch

from nxd_jax.checkpoint import arrays
from nxd_jax.checkpoint.arrays import Blocks, Held
from nxd_jax.checkpoint.shares import Share
from nxd_jax.tensor_parallel import parallel_groups
from torch_bridge import _compat
from torch_bridge.mesh import messages, places, processes, world
from torch_bridge.mesh.places import Place

Entries = dict[str, dict[str, Any]]


def needed() -> bool:
    """Whether processes may have tensors that others lack."""
    return world.process_count() > 1 and parallel_groups.initialized() and parallel_groups.size("pp") > 1


def of_all(what: str, own: object) -> list[Any]:
    """What each process says, in order. All processes call it."""
    return [pickle.loads(found) for found in processes.exchange(f"checkpoint {what}", pickle.dumps(own))]


def speaks() -> bool:
    """Whether this process is the first of the processes of some pipeline rank: the others have the same names."""
    return any(messages.processes_of(home)[0] == world.process_index() for home in places.hosted("pp"))


# -- arrays and their index --------------------------------------------------------------------------


@dataclasses.dataclass
class _Said:
    """What a process says of its arrays. entries: of those that it speaks for, with their places in the order of the whole model. objects: pickled."""

    entries: dict[str, tuple[int, dict[str, Any]]]
    aliases: dict[str, str]
    objects: bytes


@dataclasses.dataclass
class Whole:
    """What all processes have together. arrays: this process's share of each; objects: what is no tensor, of the processes that speak, in order."""

    arrays: dict[str, Share]
    entries: Entries
    aliases: dict[str, str]
    objects: list[Any]


def whole(
    found: Mapping[str, Held | np.ndarray], entries: Entries, aliases: Mapping[str, str], objects: bytes, order: Sequence[str]
) -> Whole:
    """Put together what processes have of one folder. found: this process's arrays, those of the CPU as they are. order: names of the whole model."""
    here = world.process_index()
    place = {name: k for k, name in enumerate(order)}
    said = _Said({}, dict(aliases), objects if speaks() else b"")
    for key, own in found.items():
        home = own.home if isinstance(own, Held) else None
        if home is None or messages.processes_of(home)[0] == here:
            said.entries[key] = _position(key, place), entries[key]
    everyone: list[_Said] = of_all("arrays", said)
    holders: dict[str, list[int]] = {}
    for process, other in enumerate(everyone):
        for key in other.entries:
            holders.setdefault(key, []).append(process)
    of_key = {key: other.entries[key] for other in reversed(everyone) for key in other.entries}
    keys = sorted(holders, key=lambda key: of_key[key][0])
    shared = {key: _share(of_key[key][1], found.get(key), holders[key]) for key in keys}
    names = {name: key for other in everyone for name, key in other.aliases.items()}
    return Whole(shared, {key: of_key[key][1] for key in keys}, names, [unpickled(other.objects) for other in everyone if other.objects])


def _position(key: str, place: Mapping[str, int]) -> int:
    """Of an array in the order of the model; an optimizer's is called after the parameter that it is kept for."""
    return place.get(key, place.get(key.partition("/")[2], len(place)))


def _share(entry: Mapping[str, Any], own: Held | np.ndarray | None, holders: Sequence[int]) -> Share:
    """What this process has of an array. holders: the processes that say they have it."""
    shape, dtype = tuple(entry["stored"]), np.dtype(arrays.jax_dtype(entry["dtype"]))
    here, first = world.process_index(), holders[0]
    if own is None or (isinstance(own, np.ndarray) and first != here):
        return Share(shape, dtype)
    if isinstance(own, np.ndarray):
        rank = world.first()
        with _compat.enable_x64():
            own = Held(Blocks(shape, {}), None, [jax.device_put(own, arrays.device(rank))])
        return Share(shape, dtype, own.how.sharding([rank], _spare(1)), own.blocks, True)
    ranks = _ranks(own.home, holders)
    alone = all(world.process_of(rank) == here for rank in ranks)
    return Share(shape, dtype, own.how.sharding(ranks, _spare(own.how.count) if alone else ()), own.blocks, first == here)


def _ranks(home: Place | None, holders: Collection[int]) -> list[int]:
    """The ranks that have an array."""
    narrow = None if home is None else places.ranks(home.mesh)
    if narrow is not None:
        return sorted(narrow.order)
    return [rank for rank in range(world.size()) if world.process_of(rank) in holders]


def _spare(count: int) -> list[int]:
    """So many ranks of other processes."""
    others = (rank for rank in range(world.size()) if world.process_of(rank) != world.process_index())
    return list(itertools.islice(others, count))


# -- what is no tensor -------------------------------------------------------------------------------


def unpickled(data: bytes) -> Any:
    """What another process of this job pickled with torch."""
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)


def states(found: Sequence[Mapping[str, Any]], order: Sequence[str]) -> dict[str, Any]:
    """What is no tensor of an optimizer, of what each process has for its own parameters."""
    place = {name: k for k, name in enumerate(order)}
    groups = _groups([own["param_groups"] for own in found], place)
    return {
        "class": found[0]["class"],
        "state": {name: state for own in found for name, state in own["state"].items()},
        "dtypes": {name: dtype for own in found for name, dtype in own["dtypes"].items()},
        "param_groups": groups,
        "master": _in_order((name for own in found for name in own["master"]), place),
        "order": [name for group in groups for name in group["params"]],
        "like": sorted({key for own in found for key in own["like"]}),
    }


def _in_order(names: Iterable[str], place: Mapping[str, int]) -> list[str]:
    return sorted(dict.fromkeys(names), key=lambda name: place.get(name, len(place)))


def _groups(found: Sequence[Sequence[Mapping[str, Any]]], place: Mapping[str, int]) -> list[dict[str, Any]]:
    """The groups of the whole optimizer: those with one number are one, if all that have parameters have the same options; else each stands by itself."""
    columns = list(zip(*found, strict=True)) if len({len(groups) for groups in found}) == 1 else []
    filled = [[group for group in column if group["params"]] or list(column[:1]) for column in columns]
    if columns and all(_same_options(group, column[0]) for column in filled for group in column):
        return [{**column[0], "params": _in_order((n for g in column for n in g["params"]), place)} for column in filled]
    return [dict(group) for groups in found for group in groups if group["params"]]


def _same_options(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    if one.keys() != other.keys():
        return False
    return all(_same(one[key], other[key]) for key in one if key != "params")


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor) and torch.equal(one, other)
    return bool(one == other)


def extras(found: Sequence[Mapping[str, Any]], order: Sequence[str]) -> dict[str, Any]:
    """What is no tensor of a model. Each process has it of all modules: that of the process counts which has the module's tensors.

    found: of each process "other", and the names of modules with tensors there, "modules".
    """
    merged: dict[str, Any] = {}
    for own in reversed(found):
        merged.update(own["other"])
    for own in reversed(found):
        merged.update({name: value for name, value in own["other"].items() if name.rpartition(".")[0] in own["modules"]})
    return {"other": merged}
