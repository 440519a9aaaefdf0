"""Convolutions of any number of spatial dims: forward, transposed, grouped, and their gradients."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import torch
from jax import lax

from torch_bridge.lowerings._opmath import widen
from torch_bridge.lowerings.matmul import dot, precision_of
from torch_bridge.lowerings.registry import lowering

aten = torch.ops.aten

MOST_TAPS, MOST_TAPS_OF_WEIGHT = 49, 25
"""Up to so many elements of a kernel a depthwise convolution (and the gradient of its weight) is a sum of products on CPUs, one fused loop. Other grouped
convolutions are loops over their groups there: XLA has no fast code for either."""


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
    most_taps: int = MOST_TAPS,
) -> jax.Array:
    if groups == 1:
        return _in_xla(x, w, stride, padding, dilation, 1, lhs_dilation)
    depthwise = x.shape[1] == groups
    if depthwise and (math.prod(w.shape[2:]) > most_taps or not jnp.issubdtype(x.dtype, jnp.floating)):
        return _in_xla(x, w, stride, padding, dilation, groups, lhs_dilation)

    def on_cpu(x: jax.Array, w: jax.Array) -> jax.Array:
        if depthwise:
            return _sum_of_taps(x, w, stride, padding, dilation, lhs_dilation or [1] * len(stride))
        return _by_group(x, w, stride, padding, dilation, groups, lhs_dilation)

    def default(x: jax.Array, w: jax.Array) -> jax.Array:
        return _in_xla(x, w, stride, padding, dilation, groups, lhs_dilation)

    return lax.platform_dependent(x, w, cpu=on_cpu, default=default)


def _sum_of_taps(
    x: jax.Array,
    w: jax.Array,
    stride: Sequence[int],
    padding: Sequence[tuple[int, int]],
    dilation: Sequence[int],
    lhs_dilation: Sequence[int],
) -> jax.Array:
    """A depthwise convolution: for each element of the kernel, the part of x that it meets times that element, in the opmath dtype."""
    x = lax.pad(
        x,
        jnp.zeros((), x.dtype),
        [(0, 0, 0), (0, 0, 0), *((low, high, d - 1) for (low, high), d in zip(padding, lhs_dilation, strict=True))],
    )
    x = jnp.repeat(x, w.shape[0] // x.shape[1], axis=1)
    sizes = [(i - d * (k - 1) - 1) // s + 1 for i, k, s, d in zip(x.shape[2:], w.shape[2:], stride, dilation, strict=True)]
    found = jnp.zeros((), widen(x[:0]).dtype)
    for tap in itertools.product(*map(range, w.shape[2:])):
        starts = [t * d for t, d in zip(tap, dilation, strict=True)]
        ends = [a + s * (n - 1) + 1 for a, s, n in zip(starts, stride, sizes, strict=True)]
        met = lax.slice(x, (0, 0, *starts), (*x.shape[:2], *ends), (1, 1, *stride))
        found = found + widen(met) * widen(w[(slice(None), 0, *tap)]).reshape(1, -1, *[1] * len(sizes))
    return found.astype(x.dtype)


def _by_group(
    x: jax.Array,
    w: jax.Array,
    stride: Sequence[int],
    padding: Sequence[tuple[int, int]],
    dilation: Sequence[int],
    groups: int,
    lhs_dilation: Sequence[int] | None,
) -> jax.Array:
    """A grouped convolution as a loop over its groups."""
    x = x.reshape(x.shape[0], groups, -1, *x.shape[2:]).swapaxes(0, 1)
    w = w.reshape(groups, -1, *w.shape[1:])

    def one(part: tuple[jax.Array, jax.Array]) -> jax.Array:
        return _in_xla(part[0], part[1], stride, padding, dilation, 1, lhs_dilation)

    found = lax.map(one, (x, w)).swapaxes(0, 1)
    return found.reshape(found.shape[0], -1, *found.shape[3:])


def _in_xla(
    x: jax.Array,
    w: jax.Array,
    stride: Sequence[int],
    padding: Sequence[tuple[int, int]],
    dilation: Sequence[int],
    groups: int,
    lhs_dilation: Sequence[int] | None,
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


def _gradients(
    grad: jax.Array,
    x: jax.Array,
    w: jax.Array,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    wanted: Sequence[bool],
) -> tuple[jax.Array | None, jax.Array | None]:
    """Of input and weight. A convolution is linear in each: transposing it runs no forward convolution."""

    def of_input(x: jax.Array) -> jax.Array:
        return _without_bias(x, w, stride, padding, dilation, transposed, output_padding, groups)

    def of_weight(w: jax.Array) -> jax.Array:
        if transposed or 0 in (*x.shape, *w.shape):
            return _without_bias(x, w, stride, padding, dilation, transposed, output_padding, groups)
        return _conv(x, w, stride, [(p, p) for p in padding], dilation, groups, most_taps=MOST_TAPS_OF_WEIGHT)

    grad_input = jax.linear_transpose(of_input, x)(grad)[0] if wanted[0] else None
    return grad_input, jax.linear_transpose(of_weight, w)(grad)[0] if wanted[1] else None


def _gradients_of_transposed(
    grad: jax.Array,
    x: jax.Array,
    w: jax.Array,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    output_padding: Sequence[int],
    groups: int,
    wanted: Sequence[bool],
) -> tuple[jax.Array | None, jax.Array | None]:
    """Of input and weight of a transposed convolution T. It is the adjoint of an ordinary one, C: <grad, T(x, w)> = <C(grad, w), x>.

    So the gradient of x is C(grad, w), and that of w is what it would be for C of grad, with x as the gradient of C's result. (XLA for CPUs computes the
    gradient that JAX derives from T itself thirty times slower.)
    """
    edges = [(p, p - extra) for p, extra in zip(padding, output_padding, strict=True)]
    grad_input = _conv(grad, w, stride, edges, dilation, groups) if wanted[0] else None
    if not wanted[1]:
        return grad_input, None
    of_weight = jax.linear_transpose(lambda w: _conv(grad, w, stride, edges, dilation, groups, most_taps=MOST_TAPS_OF_WEIGHT), w)
    return grad_input, of_weight(x)[0]


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
    n = input.ndim - 2
    stride, padding, dilation, output_padding = (_per_dim(v, n) for v in (stride, padding, dilation, output_padding))
    args = grad_output, input, weight, stride, padding, dilation
    empty = 0 in input.shape or 0 in weight.shape
    if transposed and not empty:
        grad_input, grad_weight = _gradients_of_transposed(*args, output_padding, groups, output_mask)
    else:
        grad_input, grad_weight = _gradients(*args, transposed, output_padding, groups, output_mask)
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
