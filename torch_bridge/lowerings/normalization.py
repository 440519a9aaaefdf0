"""Layer, group, RMS and weight norm, and their backward ops (batch norm: `batch_norm.py`).

Statistics that autograd saves have the dtypes that torch's meta kernels declare for device "xla" (float32 for bfloat16 layer
norm, where torch's CPU kernel would save bfloat16).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import torch
from jax import lax

from torch_bridge.lowerings._opmath import wide_dtype, widen
from torch_bridge.lowerings.registry import lowering
from torch_bridge.precision.precision_mode import PLAIN, Mode

aten = torch.ops.aten


def mean_and_centred(x: jax.Array, axes: tuple[int, ...], total: jax.Array | None = None) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Mean and biased variance (dims kept), and x - mean. Two passes, so that a large mean costs no digits. total: the sum of x, if it is known."""
    count = math.prod(x.shape[a] for a in axes)
    mean = (jnp.sum(x, axis=axes, keepdims=True) if total is None else total) / count
    centred = x - mean
    return mean, jnp.sum(centred * centred, axis=axes, keepdims=True) / count, centred


def _row_sum(x: jax.Array, weight: jax.Array | None, mode: Mode) -> jax.Array:
    """The sum of x * weight over the last dim, which is kept.

    On CPUs as a product of x and a vector: XLA computes a chain of elementwise ops anew for each of its readers unless a product is among them. The residual
    stream of a transformer is such a chain, from the embedding to every layer, and back. Where operands of products are rounded this is a plain sum.
    """

    def plain(x: jax.Array) -> jax.Array:
        return jnp.sum(x if weight is None else x * weight, axis=-1, keepdims=True)

    def product(x: jax.Array) -> jax.Array:
        batch = tuple(range(x.ndim - 2))
        vector = jnp.broadcast_to(jnp.ones((), x.dtype) if weight is None else weight.astype(x.dtype), (*x.shape[:-2], x.shape[-1]))
        return lax.dot_general(x, vector, (((x.ndim - 1,), (x.ndim - 2,)), (batch, batch)), precision=lax.Precision.HIGHEST)[..., None]

    return plain(x) if mode.matmul is not None or x.ndim < 2 else lax.platform_dependent(x, cpu=product, default=plain)


def _affine(x: jax.Array, weight: jax.Array | None, bias: jax.Array | None) -> jax.Array:
    if weight is not None:
        x = x * widen(weight)
    return x if bias is None else x + widen(bias)


def _cast_like(x: jax.Array | None, like: jax.Array | None) -> jax.Array | None:
    return x if x is None or like is None else x.astype(like.dtype)


@lowering(aten.native_layer_norm.default, mode=True, once=True)
def native_layer_norm(
    input: jax.Array, normalized_shape: Sequence[int], weight: jax.Array | None, bias: jax.Array | None, eps: float, *, mode: Mode = PLAIN
) -> tuple[jax.Array, jax.Array, jax.Array]:
    axes = tuple(range(input.ndim - len(normalized_shape), input.ndim))
    x = widen(input)
    mean, var, centred = mean_and_centred(x, axes, _row_sum(x, None, mode) if len(axes) == 1 else None)
    rstd = lax.rsqrt(var + eps)
    return _affine(centred * rstd, weight, bias).astype(input.dtype), mean, rstd


def _normal_grad(grad_hat: jax.Array, hat: jax.Array, rstd: jax.Array, axes: tuple[int, ...], total: jax.Array | None = None) -> jax.Array:
    """Gradient of x -> (x - mean) * rstd, given the gradient of that result and the result itself. total: the sum of the former, if it is known."""
    count = math.prod(hat.shape[a] for a in axes)
    mean_grad = (jnp.sum(grad_hat, axis=axes, keepdims=True) if total is None else total) / count
    mean_prod = jnp.sum(grad_hat * hat, axis=axes, keepdims=True) / count
    return rstd * (grad_hat - mean_grad - hat * mean_prod)


@lowering(aten.native_layer_norm_backward.default, mode=True, once=True)
def native_layer_norm_backward(
    grad_out: jax.Array,
    input: jax.Array,
    normalized_shape: Sequence[int],
    mean: jax.Array,
    rstd: jax.Array,
    weight: jax.Array | None,
    bias: jax.Array | None,
    output_mask: Sequence[bool],
    *,
    mode: Mode = PLAIN,
) -> tuple[jax.Array | None, ...]:
    first = input.ndim - len(normalized_shape)
    outer, inner = tuple(range(first)), tuple(range(first, input.ndim))
    g, rstd = widen(grad_out), widen(rstd)
    hat = (widen(input) - widen(mean)) * rstd
    total = _row_sum(g, None if weight is None else widen(weight), mode) if len(inner) == 1 else None
    grad_input = _normal_grad(_affine(g, weight, None), hat, rstd, inner, total).astype(input.dtype) if output_mask[0] else None
    grad_weight = _cast_like(jnp.sum(g * hat, axis=outer), weight) if output_mask[1] and weight is not None else None
    grad_bias = _cast_like(jnp.sum(g, axis=outer), bias if bias is not None else input) if output_mask[2] else None
    return grad_input, grad_weight, grad_bias


def _grouped(x: jax.Array, n: int, group: int) -> jax.Array:
    """[N, C, ...] as [N, G, C/G, HxW], in the opmath dtype."""
    channels = x.shape[1] if x.ndim > 1 else group
    return widen(x).reshape(n, group, channels // group, math.prod(x.shape[2:]))


def _per_channel(w: jax.Array, group: int) -> jax.Array:
    return widen(w).reshape(group, -1, 1)


@lowering(aten.native_group_norm.default, once=True)
def native_group_norm(
    input: jax.Array, weight: jax.Array | None, bias: jax.Array | None, N: int, C: int, HxW: int, group: int, eps: float
) -> tuple[jax.Array, jax.Array, jax.Array]:
    x = _grouped(input, N, group)
    mean, var, centred = mean_and_centred(x, (2, 3))
    rstd = lax.rsqrt(var + eps)
    w, b = (None if v is None else _per_channel(v, group) for v in (weight, bias))
    out = _affine(centred * rstd, w, b).reshape(input.shape).astype(input.dtype)
    return out, mean.reshape(N, group).astype(input.dtype), rstd.reshape(N, group).astype(input.dtype)


@lowering(aten.native_group_norm_backward.default, once=True)
def native_group_norm_backward(
    grad_out: jax.Array,
    input: jax.Array,
    mean: jax.Array,
    rstd: jax.Array,
    weight: jax.Array | None,
    N: int,
    C: int,
    HxW: int,
    group: int,
    output_mask: Sequence[bool],
) -> tuple[jax.Array | None, ...]:
    g, x = _grouped(grad_out, N, group), _grouped(input, N, group)
    rstd = widen(rstd).reshape(N, group, 1, 1)
    hat = (x - widen(mean).reshape(N, group, 1, 1)) * rstd
    grad_hat = g if weight is None else g * _per_channel(weight, group)
    grad_input = _normal_grad(grad_hat, hat, rstd, (2, 3)).reshape(input.shape).astype(input.dtype) if output_mask[0] else None
    like = input if weight is None else weight
    grad_weight = jnp.sum(g * hat, axis=(0, 3)).reshape(C).astype(like.dtype) if output_mask[1] else None
    grad_bias = jnp.sum(g, axis=(0, 3)).reshape(C).astype(like.dtype) if output_mask[2] else None
    return grad_input, grad_weight, grad_bias


@lowering(aten._fused_rms_norm.default)
def fused_rms_norm(
    input: jax.Array, normalized_shape: Sequence[int], weight: jax.Array | None, eps: float | None
) -> tuple[jax.Array, jax.Array]:
    axes = tuple(range(input.ndim - len(normalized_shape), input.ndim))
    x = widen(input)
    eps = float(jnp.finfo(x.dtype).eps) if eps is None else eps
    rstd = lax.rsqrt(jnp.sum(x * x, axis=axes, keepdims=True) / math.prod(normalized_shape) + eps)
    return _affine(x * rstd, weight, None).astype(input.dtype), rstd


@lowering(aten.rms_norm.default)
def rms_norm(input: jax.Array, normalized_shape: Sequence[int], weight: jax.Array | None = None, eps: float | None = None) -> jax.Array:
    out = fused_rms_norm(input, normalized_shape, weight, eps)[0]
    return out if weight is None else out.astype(jnp.promote_types(input.dtype, weight.dtype))


@lowering(aten._fused_rms_norm_backward.default)
def fused_rms_norm_backward(
    grad_out: jax.Array,
    input: jax.Array,
    normalized_shape: Sequence[int],
    rstd: jax.Array,
    weight: jax.Array | None,
    output_mask: Sequence[bool],
) -> tuple[jax.Array | None, ...]:
    first = input.ndim - len(normalized_shape)
    outer, inner = tuple(range(first)), tuple(range(first, input.ndim))
    g, rstd = widen(grad_out), widen(rstd)
    hat = widen(input) * rstd
    grad_hat = _affine(g, weight, None)
    mean_prod = jnp.sum(grad_hat * hat, axis=inner, keepdims=True) / math.prod(normalized_shape)
    grad_input = (rstd * (grad_hat - hat * mean_prod)).astype(input.dtype) if output_mask[0] else None
    grad_weight = jnp.sum(g * hat, axis=outer).astype(weight.dtype) if output_mask[1] and weight is not None else None
    return grad_input, grad_weight


def _all_but(dim: int, ndim: int) -> tuple[int, ...]:
    return tuple(d for d in range(ndim) if d != dim % ndim)


@lowering(aten._weight_norm_interface.default)
def weight_norm(v: jax.Array, g: jax.Array, dim: int = 0) -> tuple[jax.Array, jax.Array]:
    """`v * g / |v|`, norms over all dims but `dim`; the norms keep the opmath dtype."""
    wide = widen(v)
    norms = jnp.sqrt(jnp.sum(wide * wide, axis=_all_but(dim, v.ndim), keepdims=True))
    return (wide * (widen(g) / norms)).astype(v.dtype), norms.astype(wide_dtype(g.dtype))


@lowering(aten._weight_norm_interface_backward.default)
def weight_norm_backward(
    grad_w: jax.Array, saved_v: jax.Array, saved_g: jax.Array, saved_norms: jax.Array, dim: int
) -> tuple[jax.Array, jax.Array]:
    gw, v, norms = widen(grad_w), widen(saved_v), widen(saved_norms)
    along = jnp.sum(gw * v, axis=_all_but(dim, v.ndim), keepdims=True)
    grad_v = (widen(saved_g) / norms) * (gw - v * (along / (norms * norms)))
    return grad_v.astype(saved_v.dtype), (along / norms).astype(saved_g.dtype)
