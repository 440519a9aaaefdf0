"""`torch_xla.distributed.spmd.api`: what `torch.distributed.tensor` calls for a `DeviceMesh` of xla devices."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from torch_bridge.mesh import spmd
from torch_bridge.torch_xla.distributed.spmd.meshes import Mesh, ShardingError, ShardingType
from torch_bridge.torch_xla.distributed.spmd.xla_sharded_tensor import XLAShardedTensor, unwrap
from torch_bridge.torch_xla.distributed.spmd.xla_sharding import mark_sharding

__all__ = ["auto_policy", "convert_to_xla_mesh", "convert_to_xla_partition_spec", "xla_distribute_module", "xla_distribute_tensor"]


def convert_to_xla_mesh(dt_mesh: DeviceMesh) -> Mesh:
    """A `DeviceMesh("xla", ...)` as an `xs.Mesh`. Switches `xr.use_spmd()` on."""
    spmd.use()
    if dt_mesh.device_type != "xla":
        raise ShardingError(f"the DeviceMesh is one of {dt_mesh.device_type!r} devices: make it with DeviceMesh('xla', ...)")
    return Mesh(dt_mesh.mesh.flatten().tolist(), tuple(dt_mesh.mesh.size()), dt_mesh.mesh_dim_names)


def convert_to_xla_partition_spec(tensor: torch.Tensor, placements: Sequence[Any]) -> tuple[Any, ...]:
    """Placements, one for each axis of the mesh, as a partition spec, which has an entry for each dim. A dim that several axes divide gets a tuple of them.

    Raises ValueError for placements other than Shard and Replicate.
    """
    spec: list[list[int]] = [[] for _ in range(tensor.dim())]
    for axis, placement in enumerate(placements):
        if placement.is_shard():
            if not -tensor.dim() <= placement.dim < tensor.dim():
                raise ShardingError(f"{placement} names dim {placement.dim} of a tensor with {tensor.dim()} dims")
            spec[placement.dim].append(axis)
        elif not placement.is_replicate():
            raise ValueError(f"{type(placement).__name__} is no placement for a tensor on xla: it takes Shard(dim) and Replicate()")
    return tuple(None if not axes else axes[0] if len(axes) == 1 else tuple(axes) for axes in spec)


def xla_distribute_tensor(
    tensor: torch.Tensor, device_mesh: DeviceMesh, placements: Sequence[Any] | None = None, **options: Any
) -> XLAShardedTensor:
    """`xs.xla_distribute_tensor`, which `torch.distributed.tensor.distribute_tensor` calls: a tensor, moved to xla and divided over the mesh.

    placements: one for each axis of the mesh, Shard(dim) or Replicate(); None: replicated. The tensor is the global one, whatever the process.
    """
    mesh = convert_to_xla_mesh(device_mesh)
    if isinstance(tensor, XLAShardedTensor) and tensor.sharding_type not in (None, ShardingType.REPLICATED):
        raise ShardingError(f"the tensor is divided already, as {tensor.sharding_spec}: call xs.clear_sharding(tensor) first")
    plain = unwrap(tensor)
    plain = plain if plain.device.type == "xla" else plain.to("xla")
    if placements is None:
        return mark_sharding(plain, mesh, (None,) * plain.dim())
    if len(placements) != device_mesh.ndim:
        raise ShardingError(f"a DeviceMesh with {device_mesh.ndim} axes takes as many placements, got {list(placements)}")
    return mark_sharding(plain, mesh, convert_to_xla_partition_spec(plain, placements))


def xla_distribute_module(
    module: nn.Module,
    device_mesh: DeviceMesh | None = None,
    partition_fn: Callable[[str, nn.Module, DeviceMesh | None], None] | None = None,
    input_fn: Callable[..., Any] | None = None,
    output_fn: Callable[..., Any] | None = None,
) -> nn.Module:
    """`xs.xla_distribute_module`, which `torch.distributed.tensor.distribute_module` calls: `partition_fn(name, submodule, mesh)` annotates the parameters of
    each submodule; what it leaves alone is replicated. input_fn and output_fn (module, inputs or outputs, mesh) become hooks. Returns the module, on xla."""
    spmd.use()
    if partition_fn is auto_policy:
        auto_policy("", module, device_mesh)
    module.to("xla")
    for name, submodule in module.named_modules() if partition_fn is not None else ():
        partition_fn(name, submodule, device_mesh)  # type: ignore[misc]
    if input_fn is not None:
        call_in = _with_mesh(input_fn, "input_fn")
        module.register_forward_pre_hook(lambda m, inputs: call_in(m, inputs, device_mesh))
    if output_fn is not None:
        call_out = _with_mesh(output_fn, "output_fn")
        module.register_forward_hook(lambda m, inputs, outputs: call_out(m, outputs, device_mesh))
    return module


def _with_mesh(fn: Callable[..., Any], name: str) -> Callable[..., Any]:
    """A function of (module, values, mesh), also for one that takes (values, mesh)."""
    count = len(inspect.signature(fn).parameters)
    if count == 2:
        return lambda m, values, mesh: fn(values, mesh)
    if count != 3:
        raise ValueError(f"{name} takes (module, values, mesh), this one takes {count} arguments")
    return fn


def auto_policy(mod_name: str, mod: nn.Module, mesh: Any) -> None:
    """`xs.auto_policy`: raises NotImplementedError, as `xr.use_spmd(auto=True)` does."""
    from torch_bridge.torch_xla import runtime

    runtime.use_spmd(auto=True)
