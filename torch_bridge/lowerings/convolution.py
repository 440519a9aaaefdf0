"""Convolutions of any number of spatial dims: forward, transposed, grouped, and their gradients."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import torch
from jax import lax

from torch_bridge.lowerings._opmath import widen
from torch_bridge.lowerings.matmul import dot, precision_of
from torch_bridge.lowerings.registry import lowering

aten = torch.ops.aten


def _per_dim(values: Sequence[int], n: int) -> list[int]:
    """torch lets one number stand for all spatial dims."""
    return list(values) * n if len(values) == 1 else list(values)


def _conv(
    x: jax.Array,
    w: jax.Array,
    stride: Sequence[int],
    padding: Sequence[tuple[int, int]],
    dilation: Sequence[int],
    groups: int,
    lhs_dilation: Sequence[int] | None = None,
) -> jax.Array:
    n = x.ndim - 2
    spatial = "DHW"[-n:] if n <= 3 else "".join(chr(ord("a") + i) for i in range(n))
    numbers = (f"NC{spatial}", f"OI{spatial}", f"NC{spatial}")
    return lax.conv_general_dilated(
        x, w, stride, padding, lhs_dilation, dilation, numbers, feature_group_count=groups, precision=precision_of(x.dtype)
    )


def _forward(x: jax.Array, w: jax.Array, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], groups: int) -> jax.Array:
    return _conv(x, w, stride, [(p, p) for p in padding], dilation, groups)


def _flip_and_swap(w: jax.Array, groups: int) -> jax.Array:
    """A transposed convolution's weight [in, out/groups, ...] as that of the convolution it is: [out, in/groups, ...], reversed."""
    spatial = w.shape[2:]
    w = w.reshape(groups, w.shape[0] // groups, w.shape[1], *spatial).swapaxes(1, 2)
    return jnp.flip(w.reshape(-1, w.shape[2], *spatial), range(2, 2 + len(spatial)))


def _transposed(
    x: jax.Array,
    w: jax.Array,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    output_padding: Sequence[int],
    groups: int,
) -> jax.Array:
    kernel = w.shape[2:]
    edges = [(d * (k - 1) - p, d * (k - 1) - p + extra) for k, d, p, extra in zip(kernel, dilation, padding, output_padding, strict=True)]
    return _conv(x, _flip_and_swap(w, groups), [1] * len(kernel), edges, dilation, groups, lhs_dilation=stride)


def _without_bias(
    x: jax.Array,
    w: jax.Array,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> jax.Array:
    n = x.ndim - 2
    stride, padding, dilation, output_padding = (_per_dim(v, n) for v in (stride, padding, dilation, output_padding))
    if 0 in x.shape or 0 in w.shape:
        return _empty(x, w, stride, padding, dilation, transposed, output_padding, groups)
    if transposed:
        return _transposed(x, w, stride, padding, dilation, output_padding, groups)
    return _forward(x, w, stride, padding, dilation, groups)


def _empty(
    x: jax.Array,
    w: jax.Array,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> jax.Array:
    """A convolution over nothing (empty batch or no channels) is zeros, connected to both operands for `jax.vjp`."""
    sizes = [
        (i - 1) * s - 2 * p + d * (k - 1) + o + 1 if transposed else (i + 2 * p - d * (k - 1) - 1) // s + 1
        for i, k, s, p, d, o in zip(x.shape[2:], w.shape[2:], stride, padding, dilation, output_padding, strict=True)
    ]
    channels = w.shape[1] * groups if transposed else w.shape[0]
    nothing = (jnp.sum(x) + jnp.sum(w)) * 0 if x.size == 0 and w.size == 0 else jnp.zeros((), x.dtype)
    return jnp.broadcast_to(nothing.astype(x.dtype), (x.shape[0], channels, *sizes))


@lowering(aten.convolution.default, aten.convolution_overrideable.default)
def convolution(
    input: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> jax.Array:
    out = _without_bias(input, weight, stride, padding, dilation, transposed, output_padding, groups)
    if bias is None:
        return out
    return (widen(out) + widen(bias).reshape(-1, *[1] * (input.ndim - 2))).astype(out.dtype)


@lowering(aten._convolution.default)
def _convolution(
    input: jax.Array,
    weight: jax.Array | None,
    bias: jax.Array | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    benchmark: bool,
    deterministic: bool,
    cudnn_enabled: bool,
    allow_tf32: bool,
) -> jax.Array:
    return convolution(input, weight, bias, stride, padding, dilation, transposed, output_padding, groups)


@lowering(aten.convolution_backward.default)
def convolution_backward(
    grad_output: jax.Array,
    input: jax.Array,
    weight: jax.Array,
    bias_sizes: Sequence[int] | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    output_mask: Sequence[bool],
) -> tuple[jax.Array | None, ...]:
    def of_input(x: jax.Array) -> jax.Array:
        return _without_bias(x, weight, stride, padding, dilation, transposed, output_padding, groups)

    def of_weight(w: jax.Array) -> jax.Array:
        return _without_bias(input, w, stride, padding, dilation, transposed, output_padding, groups)

    # convolution is linear in each operand: transposing it runs no forward convolution
    grad_input = jax.linear_transpose(of_input, input)(grad_output)[0] if output_mask[0] else None
    grad_weight = jax.linear_transpose(of_weight, weight)(grad_output)[0] if output_mask[1] else None
    sum_dims = (0, *range(2, grad_output.ndim))
    grad_bias = jnp.sum(widen(grad_output), axis=sum_dims).astype(grad_output.dtype) if output_mask[2] else None
    return grad_input, grad_weight, grad_bias


@lowering(aten.convolution_backward_overrideable.default)
def convolution_backward_overrideable(
    grad_output: jax.Array,
    input: jax.Array,
    weight: jax.Array | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    output_mask: Sequence[bool],
) -> tuple[jax.Array | None, ...]:
    return convolution_backward(
        grad_output, input, weight, None, stride, padding, dilation, transposed, output_padding, groups, output_mask
    )


@lowering(aten.conv_tbc.default)
def conv_tbc(self: jax.Array, weight: jax.Array, bias: jax.Array, pad: int = 0) -> jax.Array:
    """self [T, B, C], weight [k, C, out] -> [T', B, out]: one matrix product for each of the k taps."""
    k = weight.shape[0]
    x = jnp.pad(self, ((pad, pad), (0, 0), (0, 0)))
    length = x.shape[0] - k + 1
    dims = (((2,), (0,)), ((), ()))
    taps = [dot(x[i : i + length], weight[i], dims, widen(x[:0]).dtype) for i in range(k)]
    return (sum(taps) + widen(bias)).astype(self.dtype)
