"""Annotations by an `OpSharding`: what `xs.mark_sharding` and `torch_xla._XLAC` have in common."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch

from torch_bridge import metrics
from torch_bridge.ir.layout import repeats_entries
from torch_bridge.mesh import spmd, world
from torch_bridge.recorder import annotate
from torch_bridge.torch_xla.distributed.spmd.meshes import Mesh, OpSharding, PartitionSpec, ShardingError, ShardingType, require_xla
from torch_bridge.torch_xla.distributed.spmd.xla_sharded_tensor import XLAShardedTensor, unwrap

logger = logging.getLogger("nxd_jax")


def mark_sharding(t: torch.Tensor, mesh: Mesh, partition_spec: PartitionSpec) -> XLAShardedTensor:
    """`xs.mark_sharding`: divide a tensor over the devices of a mesh, in place.

    partition_spec: for each dim of the tensor a mesh axis (name or number), a tuple of axes, or None; () for a number. A dim that its devices do not divide
    stays whole on each (with a warning). Returns the tensor as an `XLAShardedTensor`. Raises `ShardingError` (a ValueError and an AssertionError) for a spec
    that does not fit, and RuntimeError for a tensor that is divided otherwise already (`clear_sharding` first).
    """
    plain = unwrap(t)
    require_xla(plain, "mark_sharding")
    return mark(plain, OpSharding(mesh.sharding(partition_spec, plain.shape), plain.dim()))


def mark(plain: Any, asked: OpSharding) -> XLAShardedTensor:
    """Annotate a tensor on xla; raises RuntimeError if it is divided otherwise already."""
    before = annotate.annotation(plain)
    if before is not None and before != asked.sharding:
        old = OpSharding(before, plain.dim())
        if old.type is not ShardingType.REPLICATED and repr(old) != repr(asked):
            raise RuntimeError(
                f"mark_sharding: the tensor is annotated as {old} already, {asked} was asked for: call xs.clear_sharding(t) first"
            )
    if repeats_entries(plain._layout.size, plain._layout.stride):
        logger.warning(
            "mark_sharding of a tensor of shape %s that expand() made: its entries share memory, so it stays as it is. Mark a copy of its own (t.contiguous())",
            list(plain.shape),
        )
        return XLAShardedTensor(plain)
    if not annotate.whole(plain):
        logger.warning(
            "mark_sharding of a view (shape %s) of a tensor of shape %s: its values are divided as asked where they are computed next, the tensor itself stays "
            "as it is annotated. Mark that one, with a partition spec for its own dims",
            list(plain.shape), list(plain._storage.layout.size),
        )  # fmt: skip
    annotate.annotate(plain, asked.sharding)
    metrics.count("VirtualDeviceUsage")
    return XLAShardedTensor(plain)


def annotate_custom_sharding(t: torch.Tensor, sharding: OpSharding) -> XLAShardedTensor:
    """`xs.annotate_custom_sharding`: as `mark_sharding`, with the result of `Mesh.get_op_sharding`."""
    plain = unwrap(t)
    require_xla(plain, "annotate_custom_sharding")
    if sharding.ndim not in (None, plain.dim()):
        raise ShardingError(f"the sharding {sharding} is one of {sharding.ndim} dims, the tensor has {plain.dim()}")
    return mark(plain, OpSharding(spmd.fitted(sharding.sharding, plain.shape, "annotate_custom_sharding"), plain.dim()))


def clear_sharding(t: torch.Tensor) -> torch.Tensor:
    """`xs.clear_sharding`: take the annotation back; the tensor is replicated. Returns the tensor itself."""
    plain = unwrap(t)
    require_xla(plain, "clear_sharding")
    annotate.clear(plain)
    return plain


def wrap_as_sharded_tensor(t: torch.Tensor) -> XLAShardedTensor:
    """`xs.wrap_as_sharded_tensor`."""
    return t if isinstance(t, XLAShardedTensor) else XLAShardedTensor(t)


@dataclass
class ShardingSpec:
    """`xs.ShardingSpec`: how inputs are divided (`MpDeviceLoader(input_sharding=...)`, `xm.send_cpu_data_to_device`).

    minibatch: each process's batch is a part of the global one, in the order of processes along dim 0; one process has all of it.
    """

    mesh: Mesh
    partition_spec: PartitionSpec
    minibatch: bool = False

    def can_apply(self, t: torch.Tensor) -> bool:
        """Whether a tensor has as many dims as the spec."""
        return t.dim() == len(tuple(self.partition_spec))

    def xla_spec(self, t: torch.Tensor) -> OpSharding:
        """The sharding of a tensor."""
        return OpSharding(self.mesh.sharding(self.partition_spec, t.shape), t.dim())

    def joined(self, t: torch.Tensor) -> torch.Tensor:
        """With `minibatch`: the tensor on xla of which each process gives a part, its own CPU tensor. Raises ValueError for parts that do not lie so."""
        from torch_bridge.recorder import uploads

        shape = (t.shape[0] * world.process_count(), *t.shape[1:])
        of = self.mesh.sharding(self.partition_spec, shape)
        return uploads.from_processes(t, of)

    def apply(self, t: torch.Tensor) -> None:
        """Annotate a tensor on xla."""
        mark_sharding(t, self.mesh, self.partition_spec)
