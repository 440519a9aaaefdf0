"""Reading and writing with index tensors: `index`, `index_put`, `index_select`, `take`, `put`, `gather` and their kin.

Every read is one XLA gather and every write one XLA scatter of whole slices. torch has already rejected indices that are
out of range on CPU; on an accelerator reads clamp and writes are dropped. Negative indices wrap where torch lets them.

On CPUs a few slices, such as a token's keys in a KV cache, are updated one by one: XLA computes a scatter of so few as an update that it merges into
each reader of the result, and then copies the whole tensor for each of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import jax.numpy as jnp
import torch
from jax import lax

from torch_bridge.ir import dtypes
from torch_bridge.lowerings.registry import lowering
from torch_bridge.lowerings.shapes import wrap_dim
from torch_bridge.lowerings.types import Array, Operand, Scalar

aten = torch.ops.aten

_SCATTERS: dict[str, Callable[..., Array]] = {
    "set": lax.scatter,
    "sum": lax.scatter_add,
    "prod": lax.scatter_mul,
    "amax": lax.scatter_max,
    "amin": lax.scatter_min,
}
_BOOL_FORM = {"sum": "amax", "prod": "amin"}  # bool arithmetic: or, and
_FEW = 8
"""Slices that are updated one by one on CPUs."""
_LARGE = 4096
"""Elements of a tensor from which on they are: copies of smaller ones cost less than a branch."""


def wrap_negative(index: Array, size: int) -> Array:
    return jnp.where(index < 0, index + size, index)


def scatter_with(kind: str, x: Array, indices: Array, updates: Array, dims: lax.ScatterDimensionNumbers) -> Array:
    """One XLA scatter: `kind` set, sum, prod, amax or amin; positions out of range are dropped."""
    if x.dtype == jnp.bool_:
        kind = _BOOL_FORM.get(kind, kind)
    return _SCATTERS[kind](x, indices, updates.astype(x.dtype), dims, mode=lax.GatherScatterMode.FILL_OR_DROP)


class Points:
    """The slices of a tensor of `shape` that index tensors name: `{dim: index}`, the indices broadcast together.

    The index dims stand where the indexed dims stood if those are adjacent, else in front. `shape` is that of the result.
    """

    def __init__(self, shape: Sequence[int], indices: dict[int, Array], wrap: bool = True):
        self.source, dims = tuple(shape), tuple(sorted(indices))
        arrays = jnp.broadcast_arrays(*(wrap_negative(indices[d], shape[d]) if wrap else indices[d] for d in dims))
        wide = jnp.result_type(*arrays)
        index_shape = arrays[0].shape
        self.indices = jnp.stack([a.astype(wide) for a in arrays], axis=-1)
        kept = [d for d in range(len(shape)) if d not in indices]
        adjacent = dims[-1] - dims[0] == len(dims) - 1
        at = dims[0] if adjacent else 0
        self.dims = dims
        self.offset_dims = tuple(i if i < at else i + len(index_shape) for i in range(len(kept)))
        rest = [shape[d] for d in kept]
        self.shape = (*rest[:at], *index_shape, *rest[at:])

    def read(self, x: Array) -> Array:
        if math.prod(self.shape) == 0:
            return jnp.zeros(self.shape, x.dtype)
        numbers = lax.GatherDimensionNumbers(offset_dims=self.offset_dims, collapsed_slice_dims=self.dims, start_index_map=self.dims)
        sizes = [1 if d in self.dims else s for d, s in enumerate(self.source)]
        return lax.gather(x, self.indices, numbers, sizes, mode=lax.GatherScatterMode.PROMISE_IN_BOUNDS)

    def write(self, x: Array, values: Array, kind: str = "set") -> Array:
        """`x` with `values` (of `self.shape`) written or accumulated."""
        if math.prod(self.shape) == 0:
            return x
        if kind == "set" and math.prod(self.indices.shape[:-1]) <= _FEW and x.size >= _LARGE:
            return lax.platform_dependent(x, self.indices, values, cpu=self._one_by_one, default=self._at_once)
        return self._at_once(x, self.indices, values, kind)

    def _at_once(self, x: Array, indices: Array, values: Array, kind: str = "set") -> Array:
        numbers = lax.ScatterDimensionNumbers(
            update_window_dims=self.offset_dims, inserted_window_dims=self.dims, scatter_dims_to_operand_dims=self.dims
        )
        return scatter_with(kind, x, indices, values, numbers)

    def _one_by_one(self, x: Array, indices: Array, values: Array) -> Array:
        """A branch for each slice, which is one that changes nothing where it is out of range: XLA merges an update in a branch into no reader."""
        sizes = [1 if d in self.dims else s for d, s in enumerate(self.source)]
        front = [d for d in range(values.ndim) if d not in self.offset_dims]
        slices = jnp.transpose(values, (*front, *self.offset_dims)).reshape(-1, *sizes).astype(x.dtype)
        ends = jnp.asarray([self.source[d] for d in self.dims], indices.dtype)
        for at, new in zip(indices.reshape(-1, len(self.dims)), slices, strict=True):
            start = [at[self.dims.index(d)] if d in self.dims else jnp.zeros((), indices.dtype) for d in range(x.ndim)]
            x = lax.cond(((at >= 0) & (at < ends)).all(), lax.dynamic_update_slice, lambda x, *_: x, x, new, start)
        return x


def _is_mask(index: Array | None) -> bool:
    return index is not None and index.dtype in (jnp.bool_, jnp.uint8)


@lowering(aten.index.Tensor, aten._unsafe_index.Tensor)
def index(self: Array, indices: Sequence[Array | None]) -> Array:
    if any(_is_mask(i) for i in indices):
        raise NotImplementedError(
            "aten.index.Tensor with a boolean mask has a result whose size depends on the data, which a compiled program "
            "cannot have; use torch.where(mask, x, other), masked_fill, or torch.nonzero_static(mask, size=n) as the index"
        )
    chosen = {d: i for d, i in enumerate(indices) if i is not None}
    return Points(self.shape, chosen).read(self) if chosen else self


@lowering(aten.index_put.default, aten._unsafe_index_put.default)
def index_put(self: Array, indices: Sequence[Array | None], values: Array, accumulate: bool = False) -> Array:
    chosen = {d: i for d, i in enumerate(indices) if i is not None}
    if any(_is_mask(i) for i in chosen.values()):
        return _masked_put(self, list(indices), values, accumulate)
    if not chosen:
        values = jnp.broadcast_to(values, self.shape).astype(self.dtype)
        return _accumulated(self, values) if accumulate else values
    points = Points(self.shape, chosen)
    return points.write(self, jnp.broadcast_to(values, points.shape), "sum" if accumulate else "set")


@lowering(aten._index_put_impl.default)
def index_put_impl(self: Array, indices: Sequence[Array | None], values: Array, accumulate: bool = False, unsafe: bool = False) -> Array:
    return index_put(self, indices, values, accumulate)


def _accumulated(x: Array, values: Array) -> Array:
    return x | values if x.dtype == jnp.bool_ else x + values


def _masked_put(x: Array, indices: list[Array | None], values: Array, accumulate: bool) -> Array:
    """A write through one boolean mask with nothing but whole dims around it, without its data-dependent size.

    `values` lines up with `x.shape[:before] + (number of True,) + x.shape[after:]`. A size of 1 there is a `where`; else
    the k-th True position of the mask takes the k-th value.
    """
    if sum(i is not None for i in indices) != 1:
        raise NotImplementedError(
            "aten.index_put with a boolean mask beside other index tensors: its number of positions depends on the data. "
            "Write with torch.where and one full mask, or turn the mask into indices with torch.nonzero_static"
        )
    before, mask = next((i, jnp.not_equal(idx, 0)) for i, idx in enumerate(indices) if idx is not None)
    rest = x.ndim - before - mask.ndim
    values = values.reshape((1,) * (before + 1 + rest - values.ndim) + values.shape).astype(x.dtype)
    count, shape = values.shape[before], (1,) * mask.ndim
    if count == 0:  # torch has checked that then nothing is True
        return x
    if count > 1:
        rank = jnp.maximum(jnp.cumsum(mask.reshape(-1).astype(jnp.int64)) - 1, 0)
        values, shape = Points(values.shape, {before: rank}, wrap=False).read(values), mask.shape
    values = values.reshape(*values.shape[:before], *shape, *values.shape[before + 1 :])
    return jnp.where(mask.reshape(mask.shape + (1,) * rest), _accumulated(x, values) if accumulate else values, x)


@lowering(aten.index_select.default)
def index_select(self: Array, dim: int, index: Array) -> Array:
    x = self.reshape(-1) if self.ndim == 0 else self
    index = index.reshape(-1)
    out = Points(x.shape, {wrap_dim(dim, x.ndim): index}, wrap=False).read(x)
    return out.reshape(()) if self.ndim == 0 else out


def rows(x: Array, dim: int, index: Array) -> Points:
    """The slices of `x` along `dim` that a 1-d (or 0-d) index names."""
    return Points(x.shape, {wrap_dim(dim, x.ndim): index.reshape(-1)}, wrap=False)


def _at_least_1d(x: Array) -> Array:
    return x.reshape(1) if x.ndim == 0 else x


@lowering(aten.index_add.default)
def index_add(self: Array, dim: int, index: Array, source: Array, alpha: Scalar = 1) -> Array:
    x = _at_least_1d(self)
    points = rows(x, dim, index)
    source = source.astype(self.dtype).reshape(points.shape)
    scale = dtypes.cast(alpha, self.dtype)
    source = source & scale if self.dtype == jnp.bool_ else source * scale
    return points.write(x, source, "sum").reshape(self.shape)


@lowering(aten.index_copy.default)
def index_copy(self: Array, dim: int, index: Array, source: Array) -> Array:
    x = _at_least_1d(self)
    points = rows(x, dim, index)
    return points.write(x, source.reshape(points.shape)).reshape(self.shape)


@lowering(aten.index_fill.int_Scalar, aten.index_fill.int_Tensor)
def index_fill(self: Array, dim: int, index: Array, value: Operand) -> Array:
    """A mask over one dim and a `where`: no scatter of slices."""
    x = _at_least_1d(self)
    dim = wrap_dim(dim, x.ndim)
    chosen = wrap_negative(index.reshape(-1), x.shape[dim])
    hit = rows(jnp.zeros(x.shape[dim], jnp.bool_), 0, chosen).write(jnp.zeros(x.shape[dim], jnp.bool_), jnp.ones(chosen.shape, jnp.bool_))
    hit = hit.reshape([-1 if d == dim else 1 for d in range(x.ndim)])
    return jnp.where(hit, dtypes.cast(value, x.dtype), x).reshape(self.shape)


@lowering(aten.take.default)
def take(self: Array, index: Array) -> Array:
    return Points((self.size,), {0: index}).read(self.reshape(-1))


@lowering(aten.put.default)
def put(self: Array, index: Array, source: Array, accumulate: bool = False) -> Array:
    points = Points((self.size,), {0: index.reshape(-1)})
    return points.write(self.reshape(-1), source.reshape(-1), "sum" if accumulate else "set").reshape(self.shape)


@lowering(aten.repeat_interleave.Tensor)
def repeat_interleave(repeats: Array, output_size: int | None = None) -> Array:
    if output_size is None:
        raise NotImplementedError(
            "aten.repeat_interleave.Tensor without output_size has a result whose size depends on the data; pass output_size="
        )
    positions = jnp.arange(repeats.size, dtype=repeats.dtype)
    return jnp.repeat(positions, repeats, total_repeat_length=output_size)


@lowering(aten.nonzero_static.default)
def nonzero_static(self: Array, size: int, fill_value: int = -1) -> Array:
    """[size, ndim] positions, row-major, cut or filled up to `size`."""
    if self.ndim == 0:
        return jnp.zeros((size, 0), jnp.int64)
    if self.size == 0:
        return jnp.full((size, self.ndim), fill_value, jnp.int64)
    return jnp.stack(jnp.nonzero(self, size=size, fill_value=fill_value), axis=1).astype(jnp.int64)
