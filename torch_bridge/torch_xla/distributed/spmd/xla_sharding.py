"""`torch_xla.distributed.spmd.xla_sharding`: annotations of tensors, by mesh and partition spec."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from torch_bridge.recorder import annotate
from torch_bridge.torch_xla.distributed.fsdp.utils import XLAPatchedLinear
from torch_bridge.torch_xla.distributed.spmd.manual import _mark_manual_sharding, disable_manual_sharding, enable_manual_sharding
from torch_bridge.torch_xla.distributed.spmd.marking import (
    ShardingSpec,
    annotate_custom_sharding,
    clear_sharding,
    mark_sharding,
    wrap_as_sharded_tensor,
)
from torch_bridge.torch_xla.distributed.spmd.meshes import (
    HybridMesh,
    Mesh,
    PartitionSpec,
    ShardingError,
    ShardingType,
    get_1d_mesh,
    get_global_mesh,
    require_xla,
    set_global_mesh,
)
from torch_bridge.torch_xla.distributed.spmd.xla_sharded_tensor import XLAShardedTensor, lies, unwrap, wrapped

__all__ = [
    "EinsumLinear",
    "HybridMesh",
    "MarkShardingFunction",
    "Mesh",
    "ShardingError",
    "ShardingSpec",
    "ShardingType",
    "XLAPatchedLinear",
    "XLAShardedTensor",
    "_mark_manual_sharding",
    "annotate_custom_sharding",
    "apply_backward_optimization_barrier",
    "apply_xla_patch_to_nn_linear",
    "clear_sharding",
    "disable_manual_sharding",
    "enable_manual_sharding",
    "get_1d_mesh",
    "get_global_mesh",
    "mark_sharding",
    "mark_sharding_with_gradients",
    "set_global_mesh",
    "wrap_as_sharded_tensor",
    "wrap_if_sharded",
    "xla_patched_nn_linear_forward",
]


def mark_sharding_with_gradients(t: torch.Tensor, mesh: Mesh, partition_spec: PartitionSpec) -> torch.Tensor:
    """`xs.mark_sharding_with_gradients`: a tensor with the same values that is divided so, as is its gradient. The argument stays as it is."""
    plain = unwrap(t)
    require_xla(plain, "mark_sharding_with_gradients")
    return annotate.with_gradients(plain, mesh.sharding(partition_spec, plain.shape))


def wrap_if_sharded(t: object) -> Any:
    """`xs.wrap_if_sharded`: an annotated tensor as an `XLAShardedTensor`, anything else as it is."""
    return wrapped(t) if isinstance(t, torch.Tensor) and t.device.type == "xla" and lies(t) is not None else t


def apply_backward_optimization_barrier(m: nn.Module) -> None:
    """`xs.apply_backward_optimization_barrier`: in the backward pass the gradients of a module's parameters are there before those of its inputs go on, so that
    XLA frees what it gathered for this module."""
    from torch_bridge.recorder import barrier

    def hook(module: nn.Module, into: Any, out: Any) -> None:
        given = [p for p in (*(q.grad for q in module.parameters()), *into, *out) if isinstance(p, torch.Tensor)]
        barrier.barrier_(given)

    m.register_full_backward_hook(hook)


def xla_patched_nn_linear_forward(m: nn.Linear, input: torch.Tensor, einsum_str: str | None = None) -> Any:
    """`xs.xla_patched_nn_linear_forward`: an `nn.Linear`'s forward, for `apply_xla_patch_to_nn_linear`. `einsum_str`, which keeps shardings, is not needed."""
    return XLAPatchedLinear.apply(input, m.weight, m.bias)


class EinsumLinear(nn.Linear):
    """`xs.xla_sharding.EinsumLinear`: an `nn.Linear` with `xla_patched_nn_linear_forward`."""

    def forward(self, input: torch.Tensor) -> Any:
        return xla_patched_nn_linear_forward(self, input)


def apply_xla_patch_to_nn_linear(module: nn.Module) -> nn.Module:
    """`xs.xla_sharding.apply_xla_patch_to_nn_linear`: have an `EinsumLinear` with the same parameters in place of every `nn.Linear` inside, and return the
    module. The numbers stay. (`fsdp.utils` has a function of this name that keeps the modules.)"""
    for name, child in list(module.named_children()):
        if type(child) is not nn.Linear:
            apply_xla_patch_to_nn_linear(child)
            continue
        layer = EinsumLinear(child.in_features, child.out_features, bias=child.bias is not None, device="meta")
        layer.weight, layer.bias = child.weight, child.bias
        setattr(module, name, layer.train(child.training))
    return module


class MarkShardingFunction:
    """`xs.xla_sharding.MarkShardingFunction`: `apply(t, mesh, partition_spec)` is `mark_sharding_with_gradients`."""

    apply = staticmethod(mark_sharding_with_gradients)
