"""What of `torch_xla._XLAC` is about sharding annotations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from torch_bridge.mesh import spmd
from torch_bridge.recorder import annotate
from torch_bridge.torch_xla import _preemption
from torch_bridge.torch_xla.distributed.spmd import marking, meshes, xla_sharded_tensor
from torch_bridge.torch_xla.distributed.spmd.manual import all_reduce, full_to_shard_shape, reduce_scatter, shard_to_full_shape
from torch_bridge.torch_xla.distributed.spmd.meshes import OpSharding

__all__ = [
    "OpSharding",
    "activate_preemption",
    "all_reduce",
    "clear",
    "deactivate_preemption",
    "debug_info",
    "from_cpu_shards",
    "full_to_shard_shape",
    "load_shards",
    "local_shards",
    "mark",
    "op_sharding",
    "reduce_scatter",
    "replicas_and_indices",
    "shard_to_full_shape",
    "spec",
    "sync_point_reached",
    "type_of",
]


def spec(t: torch.Tensor) -> str:
    """`_get_xla_sharding_spec`: the annotation as XLA writes it, or how the value lies once it has been computed; empty without either."""
    return xla_sharded_tensor.sharding_text(t)


def type_of(t: torch.Tensor) -> int | None:
    """`_get_xla_sharding_type`: the `ShardingType` of an annotated tensor, None without annotation."""
    found = xla_sharded_tensor.type_of(t)
    return None if found is None else int(found)


def op_sharding(t: torch.Tensor) -> OpSharding | None:
    """`_get_xla_op_sharding`: the sharding of an annotated tensor, for `mark` of another one; None without annotation."""
    plain = xla_sharded_tensor.unwrap(t)
    found = annotate.annotation(plain)
    return None if found is None else OpSharding(found, plain.dim())


def mark(t: torch.Tensor, sharding: OpSharding) -> None:
    """`_xla_mark_sharding`."""
    marking.annotate_custom_sharding(t, sharding)


def clear(t: torch.Tensor) -> None:
    """`_xla_clear_sharding`."""
    marking.clear_sharding(t)


def local_shards(tensors: Sequence[torch.Tensor]) -> list[list[tuple[torch.Tensor, str]]]:
    """`_get_local_shards`: of each tensor the data on each device, and the device."""
    return [[(s.data, s.shard_device) for s in marking.wrap_as_sharded_tensor(t).local_shards] for t in tensors]


def replicas_and_indices(tensors: Sequence[torch.Tensor]) -> list[list[tuple[int, Any]]]:
    """`_get_local_shard_replica_and_indices`."""
    return [[(s.replica_id, s.indices) for s in marking.wrap_as_sharded_tensor(t).local_shards] for t in tensors]


def load_shards(t: torch.Tensor, data: Sequence[torch.Tensor], devices: Sequence[str]) -> None:
    """`_load_local_shards`: replace what the devices hold of a tensor."""
    shards = [xla_sharded_tensor.XLAShard(values, ..., device, 0) for values, device in zip(data, devices, strict=True)]
    marking.wrap_as_sharded_tensor(t).load_local_shards_(shards)


def debug_info(t: torch.Tensor) -> str:
    """`_get_xla_tensor_debug_info`: what a tensor is, as text."""
    plain = xla_sharded_tensor.unwrap(t)
    said = spec(plain)
    kind = f"XLAShardedData\n  Data Device: SPMD:0\n  OpSharding: {said or '{}'}\n  NumShards: {len(spmd.devices())}" if said else "XLAData"
    device = "SPMD:0" if spmd.active() else str(plain.device)
    waits = getattr(plain._storage, "segment", None) is not None
    lines = [
        f"Tensor of {plain.dtype}{list(plain.shape)} on {plain.device}",
        f"Device: {device}",
        f"ShardingSpec: {said or None}",
        f"IR: {'recorded, not run yet' if waits else 'xla::device_data'}",
        "Tensor on host: None",
        kind,
    ]
    return "\n".join(lines) + "\n"


def activate_preemption() -> None:
    """`_activate_preemption_sync_manager`: note SIGTERM from now on."""
    _preemption.activate()


def deactivate_preemption() -> None:
    """`_deactivate_preemption_sync_manager`: SIGTERM does again what it did before."""
    _preemption.deactivate()


def sync_point_reached(step: int) -> bool:
    """`_sync_point_reached`: whether SIGTERM has come, to any process of the job. All of them ask at the same step."""
    return _preemption.reached()


def from_cpu_shards(shards: Sequence[torch.Tensor], sharding: OpSharding, global_shape: Sequence[int] | None = None) -> torch.Tensor:
    """`_global_tensor_from_cpu_shards`: one xla tensor of what each device is to hold, in the order of devices.

    global_shape: of the tensor, smaller than its shards together where the last ones are padded; None: all that they hold. Raises RuntimeError for another
    number of shards, shards of several shapes, or a shape that they do not make.
    """
    meshes.require_on()
    block = tuple(shards[0].shape)
    count = len(spmd.devices())
    if len(shards) != count or any(tuple(s.shape) != block for s in shards):
        raise RuntimeError(f"one shard of one shape for each of {count} devices is needed, got shapes {[list(s.shape) for s in shards]}")
    counts = [int(np.prod([sharding.sharding.mesh.shape[a] for a in axes])) for axes in spmd.axes_of(sharding.sharding, len(block))]
    padded = tuple(n * k for n, k in zip(block, counts, strict=True))
    shape = padded if global_shape is None else tuple(global_shape)
    if len(shape) != len(block) or any(-(-n // k) != b for n, k, b in zip(shape, counts, block, strict=False)):
        raise RuntimeError(f"shards of shape {list(block)}, divided as {sharding}, do not make a tensor of shape {list(shape)}")
    by_device = dict(zip(spmd.devices(), shards, strict=True))
    whole = sharding.sharding
    host = torch.empty(padded, dtype=shards[0].dtype)
    for device, index in whole.devices_indices_map(padded).items():
        host[index] = by_device[device]
    made = host[tuple(slice(0, n) for n in shape)].contiguous().to("xla")
    marking.mark(made, OpSharding(spmd.fitted(whole, shape, "from_cpu_shards"), len(shape)))
    return made
