"""`embedding` and its dense gradient: one gather of rows, and one scatter-add of rows.

16-bit gradients add up in float32 (its atomics are also much the faster on GPUs).
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import torch

from torch_bridge.lowerings.indexing import Points
from torch_bridge.lowerings.registry import lowering

aten = torch.ops.aten
Array = jax.Array


@lowering(aten.embedding.default)
def embedding(weight: Array, indices: Array, padding_idx: int = -1, scale_grad_by_freq: bool = False, sparse: bool = False) -> Array:
    """Under JAX autodiff the row `padding_idx` gets no gradient and, with `scale_grad_by_freq`, rows are averaged, as in torch."""
    if scale_grad_by_freq:
        out = _frequency_scaled(weight, indices)
    else:
        out = _rows(weight, indices)
    if padding_idx < 0:
        return out
    return jnp.where((indices == padding_idx)[..., None], jax.lax.stop_gradient(out), out)


def _rows(weight: Array, indices: Array) -> Array:
    return Points(weight.shape, {0: indices}, wrap=False).read(weight)


@partial(jax.custom_jvp)
def _frequency_scaled(weight: Array, indices: Array) -> Array:
    return _rows(weight, indices)


@_frequency_scaled.defjvp
def _frequency_scaled_jvp(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    weight, indices = primals
    share = 1 / occurrences(indices, weight.shape[0]).astype(weight.dtype)
    return _rows(weight, indices), _rows(tangents[0], indices) * share[..., None]


def occurrences(indices: Array, num_weights: int) -> Array:
    """For each index, how often it occurs among all of them."""
    points = Points((num_weights,), {0: indices}, wrap=False)
    return points.read(points.write(jnp.zeros(num_weights, jnp.int32), jnp.ones(indices.shape, jnp.int32), "sum"))


def add_rows(rows: Array, indices: Array, num_weights: int) -> Array:
    """[n, d] rows added up by index into [num_weights, d]; indices out of range are dropped."""
    wide = jnp.float32 if rows.dtype.itemsize == 2 else rows.dtype
    table = jnp.zeros((num_weights, rows.shape[1]), wide)
    return Points(table.shape, {0: indices}, wrap=False).write(table, rows, "sum").astype(rows.dtype)


@lowering(aten.embedding_dense_backward.default)
def embedding_dense_backward(grad_output: Array, indices: Array, num_weights: int, padding_idx: int, scale_grad_by_freq: bool) -> Array:
    flat = indices.reshape(-1)
    rows = grad_output.reshape(flat.size, grad_output.shape[-1])
    if scale_grad_by_freq:
        rows = rows / occurrences(flat, num_weights).astype(rows.dtype)[:, None]
    if padding_idx >= 0:
        flat = jnp.where(flat == padding_idx, num_weights, flat)
    return add_rows(rows, flat, num_weights)


@lowering(aten.embedding_renorm.default)
def embedding_renorm(self: Array, indices: Array, max_norm: float, norm_type: float) -> Array:
    """The rows that occur and whose norm is over `max_norm` shrink to it; equal indices write equal rows."""
    points = Points(self.shape, {0: indices.reshape(-1)}, wrap=False)
    rows = points.read(self)
    wide = rows.astype(jnp.float32 if rows.dtype.itemsize == 2 else rows.dtype)
    norm = jnp.linalg.norm(wide, ord=norm_type, axis=-1, keepdims=True)
    shrunk = jnp.where(norm > max_norm, wide * (max_norm / (norm + 1e-7)), wide)
    return points.write(self, shrunk)
