"""The matrix product of a parallel linear layer, with the exchanges that belong to its input and to its input's gradient."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from nxd_jax.tensor_parallel import layer_groups, regions
from nxd_jax.tensor_parallel.casting import cast_if_autocast_enabled

if TYPE_CHECKING:
    from torch_bridge.mesh.groups import GroupLike


class _Exchange:
    """What the ranks that share out a linear layer's output do with its input: nothing, or gather the sequence; and with the input's gradient."""

    def __init__(self, group: Any, all_reduce: bool, sequence_dim: int | None, dtype: torch.dtype | None):
        self.group = group
        self.all_reduce = all_reduce
        self.sequence_dim = sequence_dim
        self.dtype = dtype

    def gathered(self, x: torch.Tensor) -> torch.Tensor:
        """The whole input."""
        return x if self.sequence_dim is None else regions.gather_along_dim(x, self.sequence_dim, self.group)

    def reduced(self, grad: torch.Tensor) -> torch.Tensor:
        """The input's gradient, summed over the ranks in `dtype`."""
        wide = grad if self.dtype is None else grad.to(self.dtype)
        if self.sequence_dim is not None:
            return regions.reduce_scatter_along_dim(wide, self.sequence_dim, process_group=self.group).to(grad.dtype)
        return regions.reduce(wide, process_group=self.group).to(grad.dtype) if self.all_reduce else grad


class Linears(torch.autograd.Function):
    """x W^T for several weights that take the same input, [..., in] and [out, in] each.

    Only this rank's own part of a sequence-parallel input is kept for backward, where it is gathered anew, as in Megatron.
    """

    @staticmethod
    def forward(ctx: Any, exchange: _Exchange, x: torch.Tensor, *weights: torch.Tensor) -> Any:
        ctx.exchange = exchange
        ctx.save_for_backward(x, *weights)
        whole = exchange.gathered(x)
        return tuple(F.linear(whole, w) for w in weights)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return None, *_gradients(ctx, grads, ctx.needs_input_grad[1], ctx.needs_input_grad[2:])


def _gradients(ctx: Any, grads: Sequence[torch.Tensor], needs_x: bool, needs_weights: Sequence[bool]) -> list[torch.Tensor | None]:
    """The gradients of what `Linears.forward` kept: of the input, then of each weight; None where not needed."""
    x, *weights = ctx.saved_tensors
    exchange: _Exchange = ctx.exchange
    grad_x = None
    if needs_x:
        own = sum((g @ w for g, w in zip(grads[1:], weights[1:], strict=True)), start=grads[0] @ weights[0])
        grad_x = exchange.reduced(own)
    flat = exchange.gathered(x).reshape(-1, x.shape[-1]) if any(needs_weights) else x
    return [grad_x, *(g.reshape(-1, g.shape[-1]).t() @ flat if need else None for g, need in zip(grads, needs_weights, strict=True))]


class LinearWithAsyncCommunication(torch.autograd.Function):
    """`neuronx_distributed.parallel_layers.layers.LinearWithAsyncCommunication`: x W^T + b, see `linear_with_async_allreduce`."""

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        async_grad_allreduce: bool,
        sequence_parallel_enabled: bool,
        sequence_dimension: int | None = 0,
        save_for_backward: bool = True,
        process_group: GroupLike = None,
        reduce_dtype: torch.dtype | None = torch.float32,
    ) -> torch.Tensor:
        exchange = _exchange(async_grad_allreduce, sequence_parallel_enabled, sequence_dimension, process_group, reduce_dtype)
        ctx.use_bias = bias is not None
        if not save_for_backward:
            return F.linear(exchange.gathered(input), weight, bias)
        (out,) = Linears.forward(ctx, exchange, input, weight)
        return out if bias is None else out + bias

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        needs_input, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_input, grad_weight = _gradients(ctx, [grad], needs_input, [needs_weight])
        grad_bias = grad.reshape(-1, grad.shape[-1]).sum(0) if ctx.use_bias and needs_bias else None
        return grad_input, grad_weight, grad_bias, None, None, None, None, None, None


def linear_with_async_allreduce(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    async_grad_allreduce: bool,
    sequence_parallel_enabled: bool,
    sequence_dimension: int | None = 0,
    autograd_func_class: Any = LinearWithAsyncCommunication,
    save_for_backward: bool = True,
    process_group: GroupLike = None,
    reduce_dtype: torch.dtype | None = torch.float32,
) -> torch.Tensor:
    """x W^T + b of a layer whose output (or input) the ranks share out.

    async_grad_allreduce: sum the input's gradient over the ranks. sequence_parallel_enabled: gather the input along `sequence_dimension` first and
    reduce-scatter its gradient. reduce_dtype: to sum that gradient in (None: its own). save_for_backward: False for inference.
    Under autocast the product is computed in its dtype.
    """
    input, weight, bias = cast_if_autocast_enabled(input, weight, bias)
    with without_autocast():
        return autograd_func_class.apply(
            input,
            weight,
            bias,
            async_grad_allreduce,
            sequence_parallel_enabled,
            sequence_dimension,
            save_for_backward,
            process_group,
            reduce_dtype,
        )


def several(
    input: torch.Tensor,
    weights: list[torch.Tensor],
    async_grad_allreduce: bool,
    sequence_parallel_enabled: bool,
    sequence_dimension: int | None = 0,
    process_group: GroupLike = None,
    reduce_dtype: torch.dtype | None = torch.float32,
) -> tuple[torch.Tensor, ...]:
    """`linear_with_async_allreduce` for several weights at once: the input is gathered, and its gradient reduced, once for all."""
    input, *weights = cast_if_autocast_enabled(input, *weights)
    exchange = _exchange(async_grad_allreduce, sequence_parallel_enabled, sequence_dimension, process_group, reduce_dtype)
    with without_autocast():
        return Linears.apply(exchange, input, *weights)


def _exchange(all_reduce: bool, gather: bool, dim: int | None, process_group: GroupLike, dtype: torch.dtype | None) -> _Exchange:
    return _Exchange(layer_groups.tensor_parallel(process_group), all_reduce, (dim or 0) if gather else None, dtype)


def without_autocast() -> Any:
    """A context in which autocast for xla is off: inputs have been cast, and backward computes in the dtype of forward."""
    return torch.autocast("xla", enabled=False) if torch.is_autocast_enabled("xla") else contextlib.nullcontext()
