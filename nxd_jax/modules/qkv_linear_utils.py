"""`neuronx_distributed.modules.qkv_linear_utils`: the steps of the autograd function of Q, K and V projections, for who writes one.

`gqa_qkv_linear_with_async_allreduce` does not use them. The sequence is dim 0.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from nxd_jax.tensor_parallel import kv_groups, parallel_groups
from torch_bridge.torch_xla.core import xla_model as xm

Maybe = torch.Tensor | None


def check_requires_grad(weight_qkv: Maybe, fuse_qkv: bool, weight_q: Maybe) -> bool:
    """Whether the weights train: the fused one, or that of Q."""
    weight = weight_qkv if fuse_qkv else weight_q
    assert weight is not None
    return weight.requires_grad


def check_use_bias(weight_qkv: Maybe, fuse_qkv: bool, weight_q: Maybe, bias_q: Maybe, bias_qkv: Maybe) -> bool:
    """Whether there is a bias, and the weights train."""
    return (bias_qkv if fuse_qkv else bias_q) is not None and check_requires_grad(weight_qkv, fuse_qkv, weight_q)


def _qkvlinear_autograd_base_setup_fwd(
    ctx: Any,
    input: torch.Tensor,
    weight_q: Maybe,
    weight_k: Maybe,
    weight_v: Maybe,
    bias_q: Maybe,
    bias_k: Maybe,
    bias_v: Maybe,
    async_grad_allreduce: bool,
    sequence_parallel_enabled: bool,
    kv_size_multiplier: int,
    weight_qkv: Maybe = None,
    bias_qkv: Maybe = None,
    fuse_qkv: bool = False,
    output_size_q: int | None = None,
    output_size_kv: int | None = None,
    reduce_dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Keep in `ctx` what the backward needs; returns the whole input, gathered along dim 0 with sequence parallelism."""
    ctx.use_bias = check_use_bias(weight_qkv, fuse_qkv, weight_q, bias_q, bias_qkv)
    ctx.compute_weight_gradient = check_requires_grad(weight_qkv, fuse_qkv, weight_q)
    ctx.async_grad_allreduce = async_grad_allreduce
    ctx.sequence_parallel_enabled = sequence_parallel_enabled
    ctx.kv_size_multiplier = kv_size_multiplier
    ctx.fuse_qkv = fuse_qkv
    ctx.reduce_dtype = reduce_dtype
    weights = [weight_qkv] if fuse_qkv else [weight_q, weight_k, weight_v]
    ctx.save_for_backward(*([input] if ctx.compute_weight_gradient else []), *weights)
    return _whole(ctx, input)


def _qkvlinear_autograd_base_setup_bwd(
    ctx: Any, grad_output_q: torch.Tensor, grad_output_k: torch.Tensor, grad_output_v: torch.Tensor
) -> tuple[Maybe, Maybe, Maybe, Maybe, Maybe, torch.Tensor, torch.Tensor]:
    """(the whole input or None, the fused weight or None, weights of Q, K and V or None, gradients of K's and V's outputs, summed over their copies)."""
    saved = list(ctx.saved_tensors)
    input = _whole(ctx, saved.pop(0)) if ctx.compute_weight_gradient else None
    fused, q, k, v = (saved[0], None, None, None) if ctx.fuse_qkv else (None, *saved[:3])
    if ctx.kv_size_multiplier > 1:
        wide = [g.to(ctx.reduce_dtype, copy=True) for g in (grad_output_k, grad_output_v)]
        groups = kv_groups.lists()
        summed = xm.all_reduce(xm.REDUCE_SUM, wide, scale=1.0, groups=groups, pin_layout=False) or wide
        grad_output_k, grad_output_v = summed[0].to(grad_output_k.dtype), summed[1].to(grad_output_v.dtype)
    return input, fused, q, k, v, grad_output_k, grad_output_v


def _qkvlinear_autograd_bwd_grad_reduce(ctx: Any, grad_input: torch.Tensor, original_dtype: torch.dtype) -> torch.Tensor:
    """The input's gradient, summed over the tensor parallel ranks if `ctx.async_grad_allreduce`."""
    if not ctx.async_grad_allreduce:
        return grad_input
    wide = grad_input.to(ctx.reduce_dtype)
    dist.all_reduce(wide, group=parallel_groups.group("tp"))
    return wide.to(original_dtype)


def _qkvlinear_autograd_bwd_no_weight_grad(ctx: Any, grad_input: torch.Tensor, original_dtype: torch.dtype) -> torch.Tensor:
    """This rank's part of the input's gradient along dim 0, summed over the ranks; for weights that do not train."""
    if ctx.async_grad_allreduce:
        raise AssertionError(
            "async_grad_allreduce and sequence_parallel_enabled exclude each other: the gradient is either summed or scattered"
        )
    return _scattered(ctx, grad_input, original_dtype)


def _qkvlinear_autograd_bwd_input_grad(ctx: Any, grad_input: torch.Tensor, original_dtype: torch.dtype) -> torch.Tensor:
    """This rank's part of the input's gradient along dim 0, summed over the ranks."""
    return _scattered(ctx, grad_input, original_dtype)


def _whole(ctx: Any, input: torch.Tensor) -> torch.Tensor:
    if not ctx.sequence_parallel_enabled:
        return input
    return xm.all_gather(input, groups=parallel_groups.lists("tp"), pin_layout=False)


def _scattered(ctx: Any, grad_input: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    wide = grad_input.to(ctx.reduce_dtype)
    count = parallel_groups.size("tp")
    part = torch.empty((wide.shape[0] // count, *wide.shape[1:]), dtype=wide.dtype, device=wide.device)
    groups = parallel_groups.lists("tp")
    xm.reduce_scatter(xm.REDUCE_SUM, wide, output=part, groups=groups, shard_count=count, scatter_dim=0, scale=1, pin_layout=False)
    return part.to(dtype)
