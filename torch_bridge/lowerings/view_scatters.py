"""Writing into a view, functionally: `*_scatter` ops, and the `*_backward` ops that write a gradient into zeros.

Contiguous ranges are `dynamic_update_slice`, which XLA does in place, or a concatenation where that may not be; strided ones are an interior-padded source
under a mask.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import torch
from jax import lax

from torch_bridge.ir import dtypes
from torch_bridge.lowerings.registry import lowering
from torch_bridge.lowerings.shapes import diagonal_span, slice_bounds, strided_positions, unfold, wrap_dim

aten = torch.ops.aten
Array = jax.Array


def pad_dim(x: Array, dim: int, low: int, high: int, interior: int = 0) -> Array:
    """`x` with zeros around one dim (negative counts crop) and `interior` zeros between its elements."""
    config = [(0, 0, 0)] * x.ndim
    config[dim] = (low, high, interior)
    return lax.pad(x, jnp.zeros((), x.dtype), config)


def _replace(x: Array, part: Array, first: int | dtypes.Scalar, dim: int, apart: bool) -> Array:
    """`x` with a part of it from `first` on replaced along one dim. apart: in a new array."""
    if not apart:
        return lax.dynamic_update_slice_in_dim(x, part, dtypes.plain(first), dim)
    if isinstance(first, dtypes.Scalar):
        position = lax.broadcasted_iota(jnp.int64, x.shape, dim) - first.value
        return jnp.where((position >= 0) & (position < part.shape[dim]), _spread(part, x.shape, first, dim), x)
    before, after = lax.slice_in_dim(x, 0, first, axis=dim), lax.slice_in_dim(x, first + part.shape[dim], None, axis=dim)
    return lax.concatenate([piece for piece in (before, part, after) if piece.shape[dim]], dim)


def _spread(part: Array, shape: Sequence[int], first: dtypes.Scalar, dim: int) -> Array:
    """Zeros of a shape, with a part from `first` on along one dim."""
    return lax.dynamic_update_slice_in_dim(jnp.zeros(tuple(shape), part.dtype), part, first.value, dim)


@lowering(aten.slice_scatter.default, writes=True)
def slice_scatter(
    self: Array,
    src: Array,
    dim: int = 0,
    start: int | dtypes.Scalar | None = None,
    end: int | dtypes.Scalar | None = None,
    step: int = 1,
    *,
    apart: bool = False,
) -> Array:
    dim = wrap_dim(dim, self.ndim)
    size = self.shape[dim]
    src = src.astype(self.dtype)
    if isinstance(start, dtypes.Scalar) or isinstance(end, dtypes.Scalar):
        assert isinstance(start, dtypes.Scalar) and step == 1, "a dynamic slice has no gaps"
        return _replace(self, src, start, dim, apart)
    first, _, length = slice_bounds(size, start, end, step)
    if length == 0:
        return self
    if length == size:
        return src
    if step == 1 or length == 1:
        return _replace(self, src, first, dim, apart)
    position = lax.broadcasted_iota(jnp.int32, self.shape, dim) - first
    written = (position >= 0) & (position < length * step) & (position % step == 0)
    return jnp.where(written, pad_dim(src, dim, first, size - first - (length - 1) * step - 1, step - 1), self)


@lowering(aten.select_scatter.default, writes=True)
def select_scatter(self: Array, src: Array, dim: int, index: int | dtypes.Scalar, *, apart: bool = False) -> Array:
    dim = wrap_dim(dim, self.ndim)
    index = index if isinstance(index, dtypes.Scalar) else index % self.shape[dim]
    return _replace(self, jnp.expand_dims(src.astype(self.dtype), dim), index, dim, apart)


def _spread_diagonal(src: Array, rows: int, cols: int, offset: int) -> Array:
    """Batched matrices with the last dim of `src` on a diagonal and zeros elsewhere."""
    start, length = diagonal_span(rows, cols, offset)
    batch = src.shape[:-1]
    if length == 0:
        return jnp.zeros((*batch, rows, cols), src.dtype)
    tail = rows * cols - start - (length - 1) * (cols + 1) - 1
    return pad_dim(src, src.ndim - 1, start, tail, cols).reshape(*batch, rows, cols)


@lowering(aten.diagonal_scatter.default)
def diagonal_scatter(self: Array, src: Array, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Array:
    x = jnp.moveaxis(self, (dim1, dim2), (-2, -1))
    rows, cols = x.shape[-2:]
    placed = _spread_diagonal(src.astype(self.dtype), rows, cols, offset)
    row, col = lax.broadcasted_iota(jnp.int32, (rows, cols), 0), lax.broadcasted_iota(jnp.int32, (rows, cols), 1)
    return jnp.moveaxis(jnp.where(col - row == offset, placed, x), (-2, -1), (dim1, dim2))


@lowering(aten.diag_embed.default)
def diag_embed(self: Array, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Array:
    n = self.shape[-1] + abs(offset)
    return jnp.moveaxis(_spread_diagonal(self, n, n, offset), (-2, -1), (dim1, dim2))


@lowering(aten.as_strided_scatter.default)
def as_strided_scatter(self: Array, src: Array, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None) -> Array:
    """See `as_strided`: `self` counts as contiguous."""
    if math.prod(size) == 0:
        return self
    position = strided_positions(size, stride, storage_offset or 0)
    return self.reshape(-1).at[position].set(src.astype(self.dtype), wrap_negative_indices=False).reshape(self.shape)


@lowering(aten.slice_backward.default)
def slice_backward(
    grad_output: Array, input_sizes: Sequence[int], dim: int, start: int | dtypes.Scalar, end: int | dtypes.Scalar, step: int
) -> Array:
    dim = wrap_dim(dim, len(input_sizes))
    size = input_sizes[dim]
    if isinstance(start, dtypes.Scalar) or isinstance(end, dtypes.Scalar):
        assert isinstance(start, dtypes.Scalar) and step == 1, "a dynamic slice has no gaps"
        return _spread(grad_output, input_sizes, start, dim)
    first, _, length = slice_bounds(size, start, end, step)
    if length == 0:
        return jnp.zeros(tuple(input_sizes), grad_output.dtype)
    return pad_dim(grad_output, dim, first, size - first - (length - 1) * step - 1, step - 1)


@lowering(aten.select_backward.default)
def select_backward(grad_output: Array, input_sizes: Sequence[int], dim: int, index: int | dtypes.Scalar) -> Array:
    dim = wrap_dim(dim, len(input_sizes))
    if isinstance(index, dtypes.Scalar):
        return _spread(jnp.expand_dims(grad_output, dim), input_sizes, index, dim)
    index = index % input_sizes[dim]
    return pad_dim(jnp.expand_dims(grad_output, dim), dim, index, input_sizes[dim] - index - 1)


@lowering(aten.diagonal_backward.default)
def diagonal_backward(grad_output: Array, input_sizes: Sequence[int], offset: int, dim1: int, dim2: int) -> Array:
    rows, cols = input_sizes[dim1], input_sizes[dim2]
    return jnp.moveaxis(_spread_diagonal(grad_output, rows, cols, offset), (-2, -1), (dim1, dim2))


@lowering(aten.unfold_backward.default)
def unfold_backward(grad_in: Array, input_sizes: Sequence[int], dim: int, size: int, step: int) -> Array:
    """The transpose of `unfold`: overlapping windows add up, positions outside any window get zero."""
    if math.prod(grad_in.shape) == 0:
        return jnp.zeros(tuple(input_sizes), grad_in.dtype)
    sample = jax.ShapeDtypeStruct(tuple(input_sizes), grad_in.dtype)
    (grad,) = jax.linear_transpose(lambda x: unfold(x, dim, size, step), sample)(grad_in)
    return grad
