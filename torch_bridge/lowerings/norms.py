"""Vector norms and what is made of them: `norm`, `dist`, `renorm`, pairwise distances."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from torch_bridge.ir import dtypes
from torch_bridge.lowerings.precision import convert, is_complex, opmath, round_to, widen
from torch_bridge.lowerings.reductions import axes, safe_sqrt
from torch_bridge.lowerings.registry import lowering
from torch_bridge.lowerings.types import Array, Dims
from torch_bridge.lowerings.unary import magnitude

aten = torch.ops.aten


def power_sum(x: Array, p: float, reduced: tuple[int, ...], keepdim: bool) -> Array:
    """sum(|x| ** p), for finite p."""
    if p == 0:
        terms = (x != 0).astype(x.real.dtype)
    elif p == 2:
        terms = x.real**2 + x.imag**2 if is_complex(x) else x * x
    else:
        terms = magnitude(x) if p == 1 else _power(magnitude(x), p)
    return jnp.sum(terms, axis=reduced, keepdims=keepdim, dtype=terms.dtype)


def _power(x: Array, p: float) -> Array:
    """x ** p for x >= 0, with gradient 0 instead of inf or NaN at x = 0."""
    zero = x == 0
    value = lax.pow(jnp.where(zero, jnp.ones_like(x), x), jnp.full_like(x, p))
    return jnp.where(zero, jnp.full_like(x, 0 if p > 0 else jnp.inf), value)


def p_norm(x: Array, p: float, reduced: tuple[int, ...], keepdim: bool = False) -> Array:
    """The p-norm over axes, in the (real) dtype of x; gradients follow torch: 0 at 0, ties of the maximum share."""
    if math.isinf(p):
        if p < 0:
            return jnp.min(magnitude(x), axis=reduced, keepdims=keepdim)
        return jnp.max(magnitude(x), axis=reduced, keepdims=keepdim, initial=0.0)
    total = power_sum(x, p, reduced, keepdim)
    if p in (0, 1):
        return total
    return safe_sqrt(total) if p == 2 else _power(total, 1 / p)


def _norm_input(x: Array, dtype: torch.dtype | None) -> tuple[Array, np.dtype]:
    """x as norms accumulate it, and the real dtype of the result."""
    target = x.dtype if dtype is None else dtypes.to_jax(dtype)
    wide = widen(x) if target == x.dtype else round_to(convert(x, opmath(target)), target)
    return wide, jnp.zeros((), target).real.dtype


@lowering(aten.linalg_vector_norm.default, lift=False, batches=True)
def vector_norm(self: Array, ord: float = 2, dim: Dims | None = None, keepdim: bool = False, dtype: torch.dtype | None = None) -> Array:
    x, result = _norm_input(self, dtype)
    return p_norm(x, float(ord), axes(dim, x.ndim), keepdim).astype(result)


@lowering(aten.linalg__powsum.default, lift=False)
def powsum(self: Array, ord: float = 2, dim: Dims | None = None, keepdim: bool = False, dtype: torch.dtype | None = None) -> Array:
    x, result = _norm_input(self, dtype)
    return power_sum(x, float(ord), axes(dim, x.ndim), keepdim).astype(result)


@lowering(aten.norm.Scalar, aten.norm.ScalarOpt_dtype, lift=False)
def norm(self: Array, p: float | None = 2, dtype: torch.dtype | None = None) -> Array:
    return vector_norm(self, 2 if p is None else p, dtype=dtype)


@lowering(aten.norm.ScalarOpt_dim, aten.norm.ScalarOpt_dim_dtype, lift=False)
def norm_dim(self: Array, p: float | None, dim: Dims, keepdim: bool = False, dtype: torch.dtype | None = None) -> Array:
    return vector_norm(self, 2 if p is None else p, dim, keepdim, dtype)


@lowering(aten.dist.default, lift=False)
def dist(self: Array, other: Array, p: float = 2) -> Array:
    a, b = dtypes.promote(self, other)
    return vector_norm(a - b, p)


@lowering(aten.renorm.default, lift=False)
def renorm(self: Array, p: float, dim: int, maxnorm: float) -> Array:
    x = widen(self)
    others = tuple(d for d in range(x.ndim) if d != dim % x.ndim)
    size = p_norm(x, float(p), others, keepdim=True)
    limit = jnp.asarray(maxnorm, size.dtype)
    factor = jnp.where(size > limit, limit / (size + 1e-7), jnp.ones_like(size))
    return (x * factor).astype(self.dtype)


def _euclidean_by_matmul(x1: Array, x2: Array) -> Array:
    """|a|^2 + |b|^2 - 2ab, clamped at 0: one matmul, at the price of cancellation for near points (as in torch)."""
    dot = jnp.matmul(x1, jnp.swapaxes(x2, -1, -2), precision=lax.Precision.HIGHEST)
    square1 = jnp.sum(x1 * x1, axis=-1)[..., :, None]
    square2 = jnp.sum(x2 * x2, axis=-1)[..., None, :]
    return safe_sqrt(jnp.maximum(square1 + square2 - 2 * dot, 0))


@lowering(aten._euclidean_dist.default)
def euclidean_dist(x1: Array, x2: Array) -> Array:
    return _euclidean_by_matmul(x1, x2)


@lowering(aten._cdist_forward.default)
def cdist(x1: Array, x2: Array, p: float, compute_mode: int | None = None) -> Array:
    rows1, rows2 = x1.shape[-2], x2.shape[-2]
    by_matmul = compute_mode == 1 or (compute_mode in (None, 0) and (rows1 > 25 or rows2 > 25))
    if p == 2 and by_matmul:
        return _euclidean_by_matmul(x1, x2)
    return p_norm(x1[..., :, None, :] - x2[..., None, :, :], p, (-1,))


@lowering(aten._cdist_backward.default)
def cdist_backward(grad: Array, x1: Array, x2: Array, p: float, cdist: Array) -> Array:
    """The gradient for x1 in the batch that both broadcast to, in closed form: 0 where the distance is 0, also along one dim for p < 1, and for p = inf
    the full gradient to every tie."""
    difference = x1[..., :, None, :] - x2[..., None, :, :]
    distance, grad = cdist[..., None], grad[..., None]
    positive = distance != 0
    safe = jnp.where(positive, distance, jnp.ones_like(distance))
    if p == 0:
        terms = jnp.zeros_like(difference)
    elif p == 1:
        terms = grad * jnp.sign(difference)
    elif p == 2:
        terms = jnp.where(positive, grad * difference / safe, 0)
    elif math.isinf(p):
        terms = jnp.where(jnp.abs(difference) == distance, grad * jnp.sign(difference), 0)
    else:
        apart = positive & (difference != 0)
        terms = jnp.where(apart, grad * jnp.sign(difference) * _power(jnp.abs(difference) / safe, p - 1), 0)
    return jnp.sum(terms, axis=-2)
