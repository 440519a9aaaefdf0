"""Regions in which the script computes with each device's block: what `torch_xla.distributed.spmd` and `torch_xla._XLAC` have of manual sharding."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torch_bridge.mesh import spmd
from torch_bridge.recorder import annotate, manual_regions
from torch_bridge.torch_xla.distributed.spmd import marking, meshes
from torch_bridge.torch_xla.distributed.spmd.meshes import Mesh, OpSharding, PartitionSpec, ShardingError
from torch_bridge.torch_xla.distributed.spmd.xla_sharded_tensor import XLAShardedTensor, unwrap

Groups = Sequence[Sequence[int]] | None


def enable_manual_sharding(t: torch.Tensor, partition_spec: PartitionSpec, *, mesh: Mesh | None = None) -> XLAShardedTensor:
    """`xs.enable_manual_sharding`: annotate a tensor, and give what each device has of it, as a tensor of the shape of one block.

    Ops on that, and on what comes of it, are done by every device on its own block; a tensor from outside is whole there. Its gradient is that of the whole
    tensor. mesh: None: the global mesh. Raises `ShardingError` (a ValueError) for a spec that does not fit, or dims that the devices do not divide.
    """
    plain = unwrap(t)
    meshes.require_xla(plain, "enable_manual_sharding")
    asked = OpSharding(_mesh("enable_manual_sharding", mesh).sharding(partition_spec), plain.dim())
    if asked.ndim != len(tuple(partition_spec)):
        raise ShardingError(f"enable_manual_sharding: {tuple(partition_spec)} has one entry for each dim of {list(plain.shape)}")
    _check_outside(plain, "enable_manual_sharding")
    entered = manual_regions.enter(plain, asked.sharding)
    with torch.no_grad():
        marking.mark(plain, asked)
    return XLAShardedTensor(entered)


def disable_manual_sharding(
    t: torch.Tensor, partition_spec: PartitionSpec, full_shape: Sequence[int], *, mesh: Mesh | None = None
) -> XLAShardedTensor:
    """`xs.disable_manual_sharding`: the tensor of shape `full_shape` whose blocks a region computed, divided as the spec says. Along mesh axes that the spec
    does not name all devices must have the same; the first one's block is taken."""
    of = _mesh("disable_manual_sharding", mesh).sharding(partition_spec)
    return XLAShardedTensor(shard_to_full_shape(t, OpSharding(of, len(tuple(partition_spec))), full_shape, unwrap(t).dtype))


def _mark_manual_sharding(t: torch.Tensor) -> XLAShardedTensor:
    """`xs._mark_manual_sharding`: a tensor of a region as it is; any other one, which must not be annotated, as one that every device has the whole of."""
    plain = unwrap(t)
    meshes.require_xla(plain, "_mark_manual_sharding")
    if manual_regions.inside(plain):
        return XLAShardedTensor(plain)
    if annotate.annotation(plain) is not None:
        raise RuntimeError("_mark_manual_sharding: the tensor is annotated already: call xs.clear_sharding(t) first")
    return XLAShardedTensor(manual_regions.enter(plain, spmd.replicated()))


def full_to_shard_shape(t: torch.Tensor) -> torch.Tensor:
    """`_XLAC._spmd_full_to_shard_shape`: what each device has of an annotated tensor."""
    plain = unwrap(t)
    meshes.require_xla(plain, "_spmd_full_to_shard_shape")
    _check_outside(plain, "_spmd_full_to_shard_shape")
    found = annotate.annotation(plain)
    if found is None:
        raise RuntimeError("_spmd_full_to_shard_shape takes an annotated tensor: call xs.mark_sharding(t, mesh, partition_spec) first")
    return manual_regions.enter(plain, found)


def shard_to_full_shape(t: torch.Tensor, sharding: OpSharding, full_shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """`_XLAC._spmd_shard_to_full_shape`. dtype: that of the tensor."""
    plain = unwrap(t)
    meshes.require_xla(plain, "_spmd_shard_to_full_shape")
    if dtype is not plain.dtype:
        raise RuntimeError(f"_spmd_shard_to_full_shape: the tensor is one of {plain.dtype}, {dtype} was asked for")
    whole = manual_regions.leave(plain, sharding.sharding, tuple(full_shape))
    with torch.no_grad():
        marking.mark(whole, OpSharding(sharding.sharding, whole.dim()))
    return whole


def all_reduce(kind: str, t: torch.Tensor, scale: float, groups: Groups) -> torch.Tensor:
    """`_XLAC._xla_spmd_all_reduce`, of tensors of a region. groups: of device numbers."""
    return manual_regions.all_reduce(kind, _inside(t, "_xla_spmd_all_reduce"), scale, groups)


def reduce_scatter(kind: str, t: torch.Tensor, scale: float, dim: int, count: int, groups: Groups) -> torch.Tensor:
    """`_XLAC._xla_spmd_reduce_scatter`, of tensors of a region."""
    return manual_regions.reduce_scatter(kind, _inside(t, "_xla_spmd_reduce_scatter"), scale, dim, count, groups)


def _inside(t: torch.Tensor, name: str) -> torch.Tensor:
    plain: torch.Tensor = unwrap(t)
    if not manual_regions.inside(plain):
        raise RuntimeError(f"{name} takes a tensor of a region of manual sharding (xs.enable_manual_sharding): outside, a tensor is global")
    return plain


def _check_outside(t: torch.Tensor, name: str) -> None:
    if manual_regions.inside(t):
        raise RuntimeError(
            f"{name}: the tensor is one of a region of manual sharding already: one device's block, which is not divided further"
        )


def _mesh(name: str, mesh: Mesh | None) -> Mesh:
    meshes.require_on()
    found = mesh if mesh is not None else meshes.get_global_mesh()
    if found is None:
        raise ShardingError(f"{name}: give a mesh (mesh=...), or set one (xs.set_global_mesh)")
    return found
