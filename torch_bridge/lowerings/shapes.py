"""Views and their `*_copy` forms: every result is a new JAX array, so a view and its copy are the same function.

Aliasing is the recorder's business. Everything here is a slice, reshape, transpose or broadcast with static bounds; only
`as_strided` with overlapping or irregular strides and long `unfold` windows need a gather.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from torch_bridge.ir import dtypes
from torch_bridge.lowerings.registry import lowering

aten = torch.ops.aten
Array = jax.Array


def wrap_dim(dim: int, ndim: int) -> int:
    """A dim in [0, ndim); 0-d tensors count as 1-d, as in torch."""
    return dim % max(ndim, 1)


def slice_bounds(size: int, start: int | None, end: int | None, step: int) -> tuple[int, int, int]:
    """First position, limit and length of a torch slice of a dim of `size`."""
    first, limit, _ = slice(start, end, step).indices(size)
    length = max(0, -(-(limit - first) // step))
    return first, max(first, limit), length


@lowering(aten.alias.default, view=True)
@lowering(aten.alias_copy.default, aten.lift_fresh.default, aten.lift_fresh_copy.default, aten.lift.default)
def alias(self: Array) -> Array:
    return self


@lowering(aten.detach.default, view=True)
@lowering(aten.detach_copy.default)
def detach(self: Array) -> Array:
    return lax.stop_gradient(self)


@lowering(aten.view.default, aten._unsafe_view.default, view=True)
@lowering(aten.view_copy.default)
def view(self: Array, size: Sequence[int]) -> Array:
    known = math.prod(s for s in size if s != -1)
    return jnp.reshape(self, [self.size // known if s == -1 else s for s in size])


@lowering(aten._reshape_alias.default, aten._reshape_alias_copy.default)
def reshape_alias(self: Array, size: Sequence[int], stride: Sequence[int]) -> Array:
    """The strides only say how torch lays out the same reshape."""
    return jnp.reshape(self, tuple(size))


@lowering(aten.view.dtype, aten.view_copy.dtype)
def view_dtype(self: Array, dtype: torch.dtype) -> Array:
    """Reinterpret the bytes; the last dim grows or shrinks by the ratio of the item sizes (little endian, as torch)."""
    target = dtypes.to_jax(dtype)
    if self.dtype == target:
        return self
    x = _as_plain_bits(self)
    plain = _plain(target)
    have, want = x.dtype.itemsize, plain.itemsize
    if have > want:
        x = lax.bitcast_convert_type(x, plain)
        x = x.reshape(*x.shape[:-2], -1) if self.ndim else x
    elif have < want:
        x = lax.bitcast_convert_type(x.reshape(*x.shape[:-1], x.shape[-1] // (want // have), want // have), plain)
        x = lax.optimization_barrier(x)  # XLA makes two casts of bits one, also if that has another shape (int32 as int64 as uint8)
    elif x.dtype != plain:
        x = lax.bitcast_convert_type(x, plain)
    return _from_plain_bits(x, target)


def _plain(dtype: np.dtype) -> np.dtype:
    """The dtype that carries the bytes of `dtype` through XLA's bitcast, which knows neither bool nor complex."""
    if dtype == jnp.bool_:
        return jnp.dtype(jnp.uint8)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return jnp.dtype(jnp.float32 if dtype == jnp.complex64 else jnp.float64)
    return dtype


def _as_plain_bits(x: Array) -> Array:
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint8)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        parts = jnp.stack([x.real, x.imag], axis=-1)
        return parts.reshape(*x.shape[:-1], -1) if x.ndim else parts
    return x


def _from_plain_bits(x: Array, target: np.dtype) -> Array:
    if target == jnp.bool_:
        return x != 0
    if jnp.issubdtype(target, jnp.complexfloating):
        pairs = x.reshape(*x.shape[:-1], -1, 2)
        return lax.complex(pairs[..., 0], pairs[..., 1])
    return x


@lowering(aten.permute.default, view=True)
@lowering(aten.permute_copy.default)
def permute(self: Array, dims: Sequence[int]) -> Array:
    return jnp.transpose(self, [wrap_dim(d, self.ndim) for d in dims])


@lowering(aten.transpose.int, view=True)
@lowering(aten.transpose_copy.int)
def transpose(self: Array, dim0: int, dim1: int) -> Array:
    if self.ndim == 0:
        return self
    return jnp.swapaxes(self, dim0, dim1)


@lowering(aten.t.default, view=True)
@lowering(aten.t_copy.default)
def t(self: Array) -> Array:
    return self.T


@lowering(aten.expand.default, view=True)
@lowering(aten.expand_copy.default)
def expand(self: Array, size: Sequence[int], implicit: bool = False) -> Array:
    shape = (1,) * (len(size) - self.ndim) + self.shape
    return jnp.broadcast_to(self, [have if want == -1 else want for have, want in zip(shape, size, strict=True)])


@lowering(aten.squeeze.default, view=True)
@lowering(aten.squeeze_copy.default)
def squeeze(self: Array) -> Array:
    return jnp.squeeze(self)


@lowering(aten.squeeze.dim, view=True)
@lowering(aten.squeeze_copy.dim)
def squeeze_dim(self: Array, dim: int) -> Array:
    return squeeze_dims(self, [dim])


@lowering(aten.squeeze.dims, view=True)
@lowering(aten.squeeze_copy.dims)
def squeeze_dims(self: Array, dim: Sequence[int]) -> Array:
    """Dims of another size than 1 stay."""
    dims = {wrap_dim(d, self.ndim) for d in dim}
    return self.reshape([s for d, s in enumerate(self.shape) if d not in dims or s != 1])


@lowering(aten.unsqueeze.default, view=True)
@lowering(aten.unsqueeze_copy.default)
def unsqueeze(self: Array, dim: int) -> Array:
    return jnp.expand_dims(self, dim)


@lowering(aten.select.int, view=True)
@lowering(aten.select_copy.int)
def select(self: Array, dim: int, index: int | dtypes.Scalar) -> Array:
    dim = wrap_dim(dim, self.ndim)
    if isinstance(index, dtypes.Scalar):
        return lax.dynamic_index_in_dim(self, index.value, dim, keepdims=False)
    return lax.index_in_dim(self, index, dim, keepdims=False)


@lowering(aten.slice.Tensor, view=True)
@lowering(aten.slice_copy.Tensor)
def slice_tensor(self: Array, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Array:
    dim = wrap_dim(dim, self.ndim)
    first, limit, _ = slice_bounds(self.shape[dim], start, end, step)
    return lax.slice_in_dim(self, first, limit, step, dim)


@lowering(aten.narrow_copy.default)
def narrow(self: Array, dim: int, start: int | dtypes.Scalar, length: int) -> Array:
    dim = wrap_dim(dim, self.ndim)
    if isinstance(start, dtypes.Scalar):
        return lax.dynamic_slice_in_dim(self, start.value, length, dim)
    start = start + self.shape[dim] if start < 0 else start
    return lax.slice_in_dim(self, start, start + length, 1, dim)


@lowering(aten.split_with_sizes.default, aten.split_with_sizes_copy.default, aten.unsafe_split_with_sizes.default)
def split_with_sizes(self: Array, split_sizes: Sequence[int], dim: int = 0) -> list[Array]:
    ends = np.cumsum(split_sizes, dtype=np.int64).tolist()
    dim = wrap_dim(dim, self.ndim)
    return [lax.slice_in_dim(self, end - size, end, 1, dim) for size, end in zip(split_sizes, ends, strict=True)]


@lowering(aten.split.Tensor, aten.split_copy.Tensor, aten.unsafe_split.Tensor)
def split(self: Array, split_size: int, dim: int = 0) -> list[Array]:
    """Pieces of `split_size`, the last one shorter; an empty dim gives one empty piece."""
    size = self.shape[wrap_dim(dim, self.ndim)]
    if size == 0:
        return [self]
    return split_with_sizes(self, [min(split_size, size - at) for at in range(0, size, split_size)], dim)


@lowering(aten.unbind.int, aten.unbind_copy.int)
def unbind(self: Array, dim: int = 0) -> list[Array]:
    dim = wrap_dim(dim, self.ndim)
    return [lax.index_in_dim(self, i, dim, keepdims=False) for i in range(self.shape[dim])]


def diagonal_span(rows: int, cols: int, offset: int) -> tuple[int, int]:
    """Where the diagonal starts in the row-major matrix, and its length; its elements are `cols + 1` apart."""
    length = min(rows, cols - offset) if offset >= 0 else min(rows + offset, cols)
    return (offset if offset >= 0 else -offset * cols), max(0, length)


@lowering(aten.diagonal.default, aten.diagonal_copy.default)
def diagonal(self: Array, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Array:
    """A strided slice of the flattened matrix, not a gather."""
    x = jnp.moveaxis(self, (dim1, dim2), (-2, -1))
    *batch, rows, cols = x.shape
    start, length = diagonal_span(rows, cols, offset)
    if length == 0:
        return jnp.zeros((*batch, 0), x.dtype)
    return lax.slice_in_dim(x.reshape(*batch, rows * cols), start, start + (length - 1) * (cols + 1) + 1, cols + 1, axis=-1)


_FEW_WINDOWS = 32


@lowering(aten.unfold.default, aten.unfold_copy.default)
def unfold(self: Array, dimension: int, size: int, step: int) -> Array:
    """Windows of a dim, each laid along a new last dim."""
    if self.ndim == 0:
        return self.reshape(1)[:size]
    dim = wrap_dim(dimension, self.ndim)
    count = (self.shape[dim] - size) // step + 1
    if size == 0:
        shape = list(self.shape)
        shape[dim] = count
        return jnp.zeros((*shape, 0), self.dtype)
    if size == step:  # no overlap: a reshape
        x = lax.slice_in_dim(self, 0, count * step, 1, dim)
        return jnp.moveaxis(x.reshape(*x.shape[:dim], count, size, *x.shape[dim + 1 :]), dim + 1, -1)
    if size <= _FEW_WINDOWS:
        span = (count - 1) * step + 1
        return jnp.stack([lax.slice_in_dim(self, i, i + span, step, dim) for i in range(size)], axis=-1)
    if count <= _FEW_WINDOWS:
        windows = jnp.stack([lax.slice_in_dim(self, i * step, i * step + size, 1, dim) for i in range(count)], axis=dim)
    else:
        windows = jax.vmap(lambda at: lax.dynamic_slice_in_dim(self, at, size, dim), out_axes=dim)(jnp.arange(count) * step)
    return jnp.moveaxis(windows, dim + 1, -1)


@lowering(aten.as_strided.default, aten.as_strided_copy.default)
def as_strided(self: Array, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None) -> Array:
    """Strides over the row-major elements of `self`, which stands for a contiguous tensor that starts its storage."""
    offset, flat = storage_offset or 0, self.reshape(-1)
    if 0 in size:
        return jnp.zeros(tuple(size), self.dtype)
    order = sorted((d for d in range(len(size)) if size[d] > 1 and stride[d] > 0), key=lambda d: -stride[d])
    if not _nested([(size[d], stride[d]) for d in order]):
        return flat.at[strided_positions(size, stride, offset)].get(mode="promise_in_bounds", wrap_negative_indices=False)
    x = _cut(flat, [(size[d], stride[d]) for d in order], offset)
    x = jnp.transpose(x, np.argsort(order).tolist())
    shape = [s if d in order else 1 for d, s in enumerate(size)]
    return jnp.broadcast_to(x.reshape(shape), tuple(size))


def _nested(levels: list[tuple[int, int]]) -> bool:
    """True if every (size, stride) fits inside one step of the level before, so that slices and reshapes reach it."""
    pairs = itertools.pairwise(levels)
    return all(outer % inner == 0 and n * inner <= outer for (_, outer), (n, inner) in pairs)


def _cut(flat: Array, levels: list[tuple[int, int]], offset: int) -> Array:
    if not levels:
        return flat[offset]
    need = levels[0][0] * levels[0][1]
    x = flat[offset : offset + need]
    x = jnp.pad(x, (0, need - x.size))  # the last step of the outer level may reach past the end, where nothing is read
    for n, step in levels:
        x = lax.slice_in_dim(x, 0, n * step, 1, -1)
        x = x.reshape(*x.shape[:-1], n, step)
    return x[..., 0]


def strided_positions(size: Sequence[int], stride: Sequence[int], offset: int) -> Array:
    """The row-major storage positions that an `as_strided` view reads."""
    position = jnp.full(tuple(size), offset, jnp.int64)
    for d, step in enumerate(stride):
        position = position + lax.broadcasted_iota(jnp.int64, tuple(size), d) * step
    return position
