"""Python objects between ranks: pickled, in rank order.

A process that hosts several ranks runs the script once, so its object stands for all of them; what in it differs by rank (ranks, xla tensors, numbers
read from them, CPU tensors and arrays of each rank) is given as each rank's own.
"""

from __future__ import annotations

import io
from typing import Any

import torch

from torch_bridge import nested
from torch_bridge.mesh import groups, processes, rank_numbers, world
from torch_bridge.mesh.groups import GroupLike
from torch_bridge.recorder import prefetch, rank_array, rank_tensor
from torch_bridge.runtime import backend


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
    """The objects of all members of this rank's group (None: of all ranks), in group order; copies, as if they had travelled."""
    parts = [own for part in processes.exchange(tag, _pack(each_ranks(obj))) for own in _unpack(part)]
    return [parts[r] for r in groups.resolve(among).of(world.first())]


def broadcast(objs: list[Any], source: int, tag: str = "objects") -> None:
    """Overwrite the list's elements with those of a global rank."""
    objs[:] = all_gather(list(objs), tag)[source]
