"""Python objects between ranks: pickled, in rank order.

A process that hosts several ranks runs the script once, so its object stands for all of them; what in it differs by rank (ranks, xla tensors, numbers
read from them, CPU tensors and arrays of each rank) is given as each rank's own.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from typing import Any

import torch

from torch_bridge import nested
from torch_bridge.mesh import groups, processes, rank_numbers, world
from torch_bridge.mesh.groups import GroupLike
from torch_bridge.recorder import prefetch, rank_array, rank_tensor
from torch_bridge.runtime import backend
from torch_bridge.script import rank_payloads


def each_ranks(obj: object) -> list[Any]:
    """What every hosted rank's object would be, xla tensors moved to the CPU."""
    count = len(world.current().hosted)
    if count == 1:
        return [prefetch.to_host(obj)]
    tensors = nested.collect(obj, _on_xla)
    shards = [_shards(t) for t in tensors]
    numbers = nested.collect(obj, _is_number)
    on_host = nested.collect(obj, _on_host)
    found = []
    for place in range(count):
        made = nested.replace(obj, _is_number, [rank_numbers.own(x, place) for x in numbers]) if numbers else obj
        made = nested.replace(made, _on_xla, [s[place] for s in shards]) if tensors else made
        found.append(nested.replace(made, _on_host, [rank_tensor.own(x, place) for x in on_host]) if on_host else made)
    return found


def _on_xla(x: object) -> bool:
    return isinstance(x, torch.Tensor) and x.device.type == "xla"


def _on_host(x: object) -> bool:
    """Whether this is a CPU tensor or an array that differs by rank."""
    return isinstance(x, rank_tensor.RankTensor) or rank_array.is_ranked(x)


def _is_number(x: object) -> bool:
    return rank_numbers.values_of(x) is not None or rank_numbers.is_item(x)


def _shards(t: torch.Tensor) -> list[torch.Tensor]:
    backend.ensure()
    from torch_bridge.recorder import sharded

    return sharded.shards(t)


def _pack(obj: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(obj, buffer)
    return buffer.getvalue()


def _unpack(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=False)


def all_gather(obj: object, tag: str = "object", among: GroupLike = None) -> list[Any]:
    """The objects of all members of this rank's group (None: of all ranks), in group order; copies, as if they had travelled. Numbers and tensors in them are
    each rank's own where the hosted ranks are in several groups."""
    members = groups.resolve(among)
    if len(world.current().hosted) > 1:
        rank_payloads.note_text(sys._getframe(1))
    parts = _by_rank(obj, tag, members)
    return _joined([[parts[r] for r in group] for group in _of_hosted(members)])


def broadcast(objs: list[Any], sources: Sequence[int], tag: str = "objects", among: GroupLike = None) -> None:
    """Overwrite the list's elements with those of a rank of the world. sources: that rank for each hosted one; it is in its group (None: of all ranks)."""
    objs[:] = _joined(_from(list(objs), sources, tag, groups.resolve(among)))


def scatter(objs: list[Any] | None, sources: Sequence[int], among: GroupLike = None) -> Any:
    """What each hosted rank gets of the list of its source, as for `broadcast`. Raises NotImplementedError for what one process cannot hold for several."""
    members = groups.resolve(among)
    given = _from(objs, sources, "scattered objects", members)
    for source, found in zip(sources, given, strict=True):
        if found is None or len(found) != members.size:
            raise ValueError(f"scatter_object_list: rank {source} has to give a list of {members.size} objects, got {found!r}")
    return _joined([found[members.index(rank)] for rank, found in zip(world.current().hosted, given, strict=True)], strict=True)


def _from(obj: object, sources: Sequence[int], tag: str, members: groups.Groups) -> list[Any]:
    """For each hosted rank, the object of its source."""
    for rank, source in zip(world.current().hosted, sources, strict=True):
        if source not in members.of(rank):
            raise ValueError(
                f"src={source} is not in the group {list(members.of(rank))} of rank {rank}: src is a rank of the world, group_src a place in the group"
            )
    parts = _by_rank(obj, tag, members)
    return [parts[source] for source in sources]


def _by_rank(obj: object, tag: str, members: groups.Groups) -> dict[int, Any]:
    """The objects of the ranks of all processes that the groups of the ranks here concern."""
    concerned = members.processes()
    told = processes.exchange(tag, _pack(each_ranks(obj)), concerned)
    each = len(world.current().hosted)
    numbers = range(len(told)) if concerned is None else concerned
    return {number * each + k: own for number, part in zip(numbers, told, strict=True) for k, own in enumerate(_unpack(part))}


def _of_hosted(members: groups.Groups) -> list[tuple[int, ...]]:
    """The groups of the hosted ranks; one if it is the same for all."""
    found = [members.of(rank) for rank in world.current().hosted]
    return found[:1] if len(set(found)) == 1 else found


def _joined(objs: Sequence[Any], strict: bool = False) -> Any:
    """One object of those of the hosted ranks, in order: numbers and tensors that differ are each rank's own, other things are the first one's.

    strict: raise NotImplementedError for other things that differ.
    """
    first = objs[0]
    if all(o is first for o in objs):
        return first
    if isinstance(first, torch.Tensor):
        same = all(isinstance(o, torch.Tensor) and o.dtype == first.dtype and torch.equal(o, first) for o in objs)
        return first if same else rank_tensor.RankTensor(objs)
    if isinstance(first, (bool, int, float)) and all(type(o) is type(first) for o in objs):
        return rank_numbers.item(tuple(objs))
    if type(first) in (list, tuple) and all(type(o) is type(first) and len(o) == len(first) for o in objs):
        return type(first)(_joined(parts, strict) for parts in zip(*objs, strict=True))
    if type(first) is dict and all(type(o) is dict and o.keys() == first.keys() for o in objs):
        return {key: _joined([o[key] for o in objs], strict) for key in first}
    if strict and any(o != first for o in objs):
        raise NotImplementedError(
            f"scatter_object_list: one process runs for all ranks here, so Python objects such as {first!r} cannot differ among them; numbers, CPU tensors, "
            "and lists and dicts of them can"
        )
    return first
