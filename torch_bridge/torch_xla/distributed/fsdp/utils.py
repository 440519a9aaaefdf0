"""`torch_xla.distributed.fsdp.utils`: checkpoints of modules, `nn.Linear` with a backward pass of its own, and collectives that exchange nothing."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from torch_bridge.mesh import world
from torch_bridge.torch_xla.distributed.fsdp import checkpoint_module

if TYPE_CHECKING:
    from torch_bridge.mesh.groups import GroupLike

__all__ = [
    "XLAPatchedLinear",
    "apply_xla_patch_to_nn_linear",
    "checkpoint_module",
    "dummy_all_gather",
    "dummy_all_reduce",
    "dummy_reduce_scatter",
]


class XLAPatchedLinear(torch.autograd.Function):
    """`fsdp.utils.XLAPatchedLinear`: `torch.nn.functional.linear`, whose backward pass holds the weight itself and nothing made of it."""

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        ctx.save_for_backward(input, weight)
        return torch.nn.functional.linear(input, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        input, weight = (t.to(grad.dtype) for t in ctx.saved_tensors)  # what autocast made of them
        for_input, for_weight, *rest = ctx.needs_input_grad
        rows = grad.reshape(-1, grad.shape[-1])
        return (
            grad @ weight if for_input else None,
            rows.T @ input.reshape(-1, input.shape[-1]) if for_weight else None,
            *([rows.sum(0) if rest[0] else None] if rest else []),
        )


def _forward(m: nn.Linear, input: torch.Tensor) -> torch.Tensor:
    return XLAPatchedLinear.apply(input, m.weight, m.bias)


def apply_xla_patch_to_nn_linear(module: nn.Module, patched_function: Callable[..., torch.Tensor] = _forward) -> nn.Module:
    """`fsdp.utils.apply_xla_patch_to_nn_linear`: have every `nn.Linear` inside call `patched_function(m, input)`, and return the module.

    The numbers stay. Layers whose forward is no longer `nn.Linear`'s are left alone; those of `checkpoint_module` are not.
    """
    for m in module.modules():
        for name in ("forward", "_xla_checkpointed_forward_original"):
            method = getattr(m, name, None)
            if isinstance(m, nn.Linear) and getattr(method, "__func__", None) is nn.Linear.forward:
                m._nn_linear_forward_original = method  # type: ignore[assignment]
                setattr(m, name, MethodType(patched_function, m))
    return module


def dummy_all_gather(value: torch.Tensor, dim: int = 0, groups: GroupLike = None) -> torch.Tensor:
    """`fsdp.utils.dummy_all_gather`: of the shape that a gather of all ranks' tensors has, made of this rank's."""
    return torch.cat([value] * world.size(), dim)


def dummy_all_reduce(reduce_type: str, inputs: Any, scale: float = 1.0, groups: GroupLike = None) -> Any:
    """`fsdp.utils.dummy_all_reduce`: this rank's own, scaled; a list in place."""
    return inputs * scale if isinstance(inputs, torch.Tensor) else [t.mul_(scale) for t in inputs]


def dummy_reduce_scatter(
    reduce_type: str, input: torch.Tensor, scale: float, scatter_dim: int, shard_count: int, groups: GroupLike = None
) -> torch.Tensor:
    """`fsdp.utils.dummy_reduce_scatter`: this rank's part of its own, scaled."""
    if shard_count != world.size():
        raise ValueError(f"dummy_reduce_scatter: shard_count={shard_count} must be the number of ranks, {world.size()}")
    part = input.shape[scatter_dim] // shard_count
    return input.narrow(scatter_dim, world.rank() * part, part) * scale
