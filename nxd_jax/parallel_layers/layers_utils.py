"""`neuronx_distributed.parallel_layers.layers_utils`: the steps of a parallel linear layer's autograd function, for who writes one.

`linear_with_async_allreduce` does not use them. In order: `_linear_autograd_base_setup_fwd` in forward; in backward `_linear_autograd_base_setup_bwd`,
then `_linear_autograd_bwd_grad_reduce` (the input's gradient is summed over the ranks), or one of the two that scatter it (sequence parallelism).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from nxd_jax.parallel_layers.mappings import _gather_along_dim, _reduce_scatter_along_dim
from nxd_jax.parallel_layers.parallel_state import get_tensor_model_parallel_group

if TYPE_CHECKING:
    from torch_bridge.mesh.groups import GroupLike


def _linear_autograd_base_setup_fwd(
    ctx: Any,
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    async_grad_allreduce: bool,
    sequence_parallel_enabled: bool,
    sequence_dimension: int | None = 0,
    save_for_backward: bool = True,
    process_group: GroupLike = None,
    reduce_dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Keep in `ctx` what the backward needs; returns the whole input, gathered along `sequence_dimension` with sequence parallelism."""
    trains = weight.requires_grad
    ctx.use_bias = trains and bias is not None
    ctx.compute_weight_gradient = trains
    ctx.async_grad_allreduce = async_grad_allreduce
    ctx.sequence_parallel_enabled = sequence_parallel_enabled
    ctx.sequence_dimension = sequence_dimension
    ctx.process_group = get_tensor_model_parallel_group() if process_group is None else process_group
    ctx.reduce_dtype = reduce_dtype
    if save_for_backward:
        ctx.save_for_backward(*([input] if trains else []), weight)
    return _whole(ctx, input)


def _linear_autograd_base_setup_bwd(ctx: Any, grad_outputs: Any) -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor]:
    """(the whole input, or None if the weight does not train; the weight; the first of `grad_outputs`)."""
    if not ctx.compute_weight_gradient:
        return None, ctx.saved_tensors[0], grad_outputs[0]
    input, weight = ctx.saved_tensors
    return _whole(ctx, input), weight, grad_outputs[0]


def _linear_autograd_bwd_grad_reduce(ctx: Any, grad_input: torch.Tensor, original_dtype: torch.dtype) -> Any:
    """Sum the input's gradient over the ranks, in `ctx.reduce_dtype`, into `grad_input`. Returns what `wait()` is called on, or None."""
    if not ctx.async_grad_allreduce:
        return None
    wide = grad_input.to(ctx.reduce_dtype)
    handle = dist.all_reduce(wide, group=ctx.process_group, async_op=True)
    if wide is not grad_input:
        if isinstance(handle, dist.Work):
            handle.wait()
        grad_input.copy_(wide)
    return handle


def _linear_autograd_bwd_no_weight_grad(ctx: Any, grad_input: torch.Tensor, original_dtype: torch.dtype) -> torch.Tensor:
    """This rank's part of the input's gradient along the sequence, summed over the ranks; for a weight that does not train."""
    return _scattered(ctx, grad_input, original_dtype)


def _linear_autograd_bwd_input_grad(
    ctx: Any, grad_input: torch.Tensor, handle: Any, original_dtype: torch.dtype
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """(this rank's part of the input's gradient with sequence parallelism, else None; the gradient of the whole input, when `handle` is done)."""
    part = _scattered(ctx, grad_input, original_dtype) if ctx.sequence_parallel_enabled else None
    if ctx.async_grad_allreduce:
        handle.wait()
        grad_input = grad_input.to(original_dtype)
    return part, grad_input


def _whole(ctx: Any, input: torch.Tensor) -> torch.Tensor:
    if not ctx.sequence_parallel_enabled:
        return input
    if ctx.sequence_dimension is None:
        raise AssertionError("sequence_parallel_enabled=True needs a sequence_dimension, got None")
    return _gather_along_dim(input, ctx.sequence_dimension, process_group=ctx.process_group)


def _scattered(ctx: Any, grad_input: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if ctx.async_grad_allreduce:
        raise AssertionError(
            "async_grad_allreduce and sequence_parallel_enabled exclude each other: the gradient is either summed or scattered"
        )
    return _reduce_scatter_along_dim(grad_input.to(ctx.reduce_dtype), ctx.sequence_dimension, process_group=ctx.process_group).to(dtype)
