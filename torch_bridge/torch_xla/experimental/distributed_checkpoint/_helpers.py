"""What is divided in a state dict, and state dicts of CPU tensors in which it stays so."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from torch_bridge import nested
from torch_bridge.recorder import prefetch
from torch_bridge.torch_xla.distributed.spmd.meshes import ShardingType
from torch_bridge.torch_xla.distributed.spmd.xla_sharded_tensor import XLAShard, XLAShardedTensor, type_of, unwrap

__all__ = ["_CpuShards", "_is_sharded_tensor", "_sharded_cpu_state_dict", "_unwrap_xla_sharded_tensor", "on_cpu", "plain", "whole"]


@dataclass
class _CpuShards:
    """What the devices of this process held of a divided tensor."""

    shards: list[XLAShard]
    global_shape: torch.Size


def _is_sharded_tensor(x: object) -> bool:
    """Whether it is an `XLAShardedTensor` of which devices have different parts."""
    return isinstance(x, XLAShardedTensor) and is_divided(x)


def _unwrap_xla_sharded_tensor(x: object) -> Any:
    """The tensor itself of an `XLAShardedTensor`; anything else as it is."""
    return unwrap(x)


def _sharded_cpu_state_dict(state_dict: dict[str, Any]) -> dict[str, Any]:
    """A state dict with values of now on the CPU: `_CpuShards` for tensors that are annotated as divided, CPU tensors for all others."""
    given = plain(state_dict)
    tensors = nested.collect(given, is_divided)
    kept = [_CpuShards(XLAShardedTensor(t).local_shards, t.shape) for t in tensors]
    return prefetch.to_host(nested.replace(given, is_divided, kept) if tensors else given)


def is_divided(x: object) -> bool:
    """Whether it is an xla tensor that is annotated as divided."""
    return isinstance(x, torch.Tensor) and x.device.type == "xla" and type_of(x) not in (None, ShardingType.REPLICATED, ShardingType.MANUAL)


def plain(data: object) -> Any:
    """Nested data with tensors themselves in place of `XLAShardedTensor`s."""
    marked = nested.collect(data, lambda x: isinstance(x, XLAShardedTensor))
    return nested.replace(data, lambda x: isinstance(x, XLAShardedTensor), [unwrap(t) for t in marked]) if marked else data


def whole(shards: _CpuShards) -> torch.Tensor:
    """The CPU tensor whose parts these are. Raises ValueError if parts are missing: other processes have them."""
    made = torch.empty(shards.global_shape, dtype=shards.shards[0].data.dtype)
    seen = torch.zeros(shards.global_shape, dtype=torch.bool)
    for shard in shards.shards:
        index = ... if shard.indices is ... else tuple(shard.indices)
        made[index] = shard.unpadded_data
        seen[index] = True
    if not seen.all():
        raise ValueError(
            f"a tensor of shape {list(shards.global_shape)} is divided among processes, and this one has {len(shards.shards)} of its shards: give the planner "
            "the state dict itself, whose tensors all processes gather"
        )
    return made


def on_cpu(state_dict: dict[str, Any]) -> dict[str, Any]:
    """The same with whole CPU tensors in place of those on xla, and of `_CpuShards`; values of now."""
    given = plain(state_dict)

    def cut(x: object) -> bool:
        return isinstance(x, _CpuShards)

    found = nested.collect(given, cut)
    return prefetch.to_host(nested.replace(given, cut, [whole(s) for s in found]) if found else given)
