"""softmax and log_softmax, with float32 inside for half precision, and their backward ops."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import torch
from jax import lax

from torch_bridge.ir import dtypes
from torch_bridge.lowerings._opmath import widen
from torch_bridge.lowerings.registry import lowering

aten = torch.ops.aten


def _shifted(x: jax.Array, dim: int | None) -> jax.Array:
    """`x` minus its maximum. A row of -inf gives NaN, as torch does."""
    return x - lax.stop_gradient(jnp.max(x, axis=dim, keepdims=True, initial=-jnp.inf))


def _axis(x: jax.Array, dim: int) -> int | None:
    """The axis to reduce; None (which JAX takes as all dims) for a 0-d tensor."""
    return dim if x.ndim else None


@lowering(aten._softmax.default)
def softmax(self: jax.Array, dim: int, half_to_float: bool) -> jax.Array:
    axis = _axis(self, dim)
    e = jnp.exp(_shifted(widen(self), axis))
    out = e / jnp.sum(e, axis=axis, keepdims=True)
    return out if half_to_float else out.astype(self.dtype)


@lowering(aten._log_softmax.default)
def log_softmax(self: jax.Array, dim: int, half_to_float: bool) -> jax.Array:
    axis = _axis(self, dim)
    x = _shifted(widen(self), axis)
    out = x - jnp.log(jnp.sum(jnp.exp(x), axis=axis, keepdims=True))
    return out if half_to_float else out.astype(self.dtype)


@lowering(aten._softmax_backward_data.default)
def softmax_backward_data(grad_output: jax.Array, output: jax.Array, dim: int, input_dtype: torch.dtype) -> jax.Array:
    g, y = widen(grad_output), widen(output)
    gy = g * y
    return (gy - y * jnp.sum(gy, axis=_axis(y, dim), keepdims=True)).astype(dtypes.to_jax(input_dtype))


@lowering(aten._log_softmax_backward_data.default)
def log_softmax_backward_data(grad_output: jax.Array, output: jax.Array, dim: int, input_dtype: torch.dtype) -> jax.Array:
    g, y = widen(grad_output), widen(output)
    return (g - jnp.exp(y) * jnp.sum(g, axis=_axis(y, dim), keepdims=True)).astype(dtypes.to_jax(input_dtype))


@lowering(aten._safe_softmax.default)
def safe_softmax(self: jax.Array, dim: int, dtype: torch.dtype | None = None) -> jax.Array:
    """softmax in which a row of nothing but -inf gives zeros."""
    x = self if dtype is None else dtypes.cast(self, dtypes.to_jax(dtype))
    if not jnp.issubdtype(x.dtype, jnp.floating):
        x = dtypes.cast(x, dtypes.to_jax(torch.get_default_dtype()))
    empty = jnp.all(x == -jnp.inf, axis=_axis(x, dim), keepdims=True)
    out = softmax(jnp.where(empty, jnp.zeros_like(x), x), dim, False)
    return jnp.where(empty, jnp.zeros_like(out), out)


def _broadcast_mask(mask: jax.Array, x: jax.Array, mask_type: int | None) -> jax.Array:
    """The mask of `nn.TransformerEncoder`'s fast path over scores [B, H, L, L]: 0 is [L, L], 1 is [B, L] of keys, 2 is the full shape."""
    if mask_type == 1 and mask.shape != x.shape:
        mask = mask[:, None, None, :]
    return jnp.broadcast_to(mask, x.shape)


@lowering(aten._masked_softmax.default)
def masked_softmax(self: jax.Array, mask: jax.Array, dim: int | None = None, mask_type: int | None = None) -> jax.Array:
    """softmax over the positions where `mask` is False; the others give zeros, a row with no position left NaN, as torch does."""
    axis = self.ndim - 1 if dim is None else dim
    x = jnp.where(_broadcast_mask(mask, self, mask_type), -jnp.inf, widen(self))
    return softmax(x, axis, False).astype(self.dtype)


@lowering(aten._masked_softmax_backward.default)
def masked_softmax_backward(grad_output: jax.Array, output: jax.Array, mask: jax.Array, dim: int | None = None) -> jax.Array:
    dim = output.ndim - 1 if dim is None else dim
    grad = softmax_backward_data(grad_output, output, dim, dtypes.to_torch(output.dtype))
    return jnp.where(jnp.broadcast_to(mask, output.shape), jnp.zeros_like(grad), grad)
