"""`gather`, the `scatter` family and `index_reduce`.

The dims beside `dim` are batch dims of XLA's gather and scatter, so no index tensor is built for them. An index that is
smaller than the tensor works on the leading block of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import torch
from jax import lax

from torch_bridge.ir import dtypes
from torch_bridge.lowerings.indexing import rows, scatter_with
from torch_bridge.lowerings.registry import lowering
from torch_bridge.lowerings.shapes import wrap_dim
from torch_bridge.lowerings.types import Array, DType, Scalar

aten = torch.ops.aten


def _as_1d(*arrays: Array) -> list[Array]:
    return [a.reshape(1) if a.ndim == 0 else a for a in arrays]


def _leading_block(shape: Sequence[int], index: Array, dim: int) -> list[int]:
    """The block of the tensor that an index reaches: all of `dim`, and of the others as much as the index has."""
    return [s if d == dim else index.shape[d] for d, s in enumerate(shape)]


def _cut(x: Array, shape: Sequence[int]) -> Array:
    return x if x.shape == tuple(shape) else lax.slice(x, [0] * x.ndim, shape)


def gather_along(x: Array, dim: int, index: Array) -> Array:
    """x[..., index, ...] along `dim`, elementwise in the others; all of the same ndim >= 1."""
    if index.size == 0:
        return jnp.zeros(index.shape, x.dtype)
    batch = tuple(d for d in range(x.ndim) if d != dim)
    numbers = lax.GatherDimensionNumbers(
        offset_dims=(), collapsed_slice_dims=(dim,), start_index_map=(dim,), operand_batching_dims=batch, start_indices_batching_dims=batch
    )
    block = _cut(x, _leading_block(x.shape, index, dim))
    return lax.gather(block, index[..., None], numbers, (1,) * x.ndim, mode=lax.GatherScatterMode.PROMISE_IN_BOUNDS)


def scatter_along(kind: str, x: Array, dim: int, index: Array, src: Array) -> Array:
    """Write or accumulate `src` (of the index's shape, or larger) at `index` along `dim`."""
    if index.size == 0:
        return x
    batch = tuple(d for d in range(x.ndim) if d != dim)
    numbers = lax.ScatterDimensionNumbers(
        update_window_dims=(),
        inserted_window_dims=(dim,),
        scatter_dims_to_operand_dims=(dim,),
        operand_batching_dims=batch,
        scatter_indices_batching_dims=batch,
    )
    shape = _leading_block(x.shape, index, dim)
    block = scatter_with(kind, _cut(x, shape), index[..., None], _cut(src, index.shape), numbers)
    return block if block.shape == x.shape else lax.dynamic_update_slice(x, block, [0] * x.ndim)


@lowering(aten.gather.default)
def gather(self: Array, dim: int, index: Array, sparse_grad: bool = False) -> Array:
    if index.size == 0:
        return jnp.zeros(index.shape, self.dtype)
    x, at = _as_1d(self, index)
    return gather_along(x, wrap_dim(dim, x.ndim), at).reshape(index.shape)


def _scatter(kind: str, self: Array, dim: int, index: Array, src: Array) -> Array:
    x, at, src = _as_1d(self, index, src)
    if at.size == 0:  # torch lets an empty index have any shape
        return self
    return scatter_along(kind, x, wrap_dim(dim, x.ndim), at, src).reshape(self.shape)


@lowering(aten.scatter.src)
def scatter_src(self: Array, dim: int, index: Array, src: Array) -> Array:
    return _scatter("set", self, dim, index, src)


@lowering(aten.scatter.value)
def scatter_value(self: Array, dim: int, index: Array, value: Scalar) -> Array:
    return _scatter("set", self, dim, index, jnp.broadcast_to(dtypes.cast(value, self.dtype), index.shape))


@lowering(aten.scatter_add.default)
def scatter_add(self: Array, dim: int, index: Array, src: Array) -> Array:
    return _scatter("sum", self, dim, index, src)


_OLD_NAMES = {"add": "sum", "multiply": "prod"}


@lowering(aten.scatter.reduce)
def scatter_src_reduce(self: Array, dim: int, index: Array, src: Array, reduce: str) -> Array:
    return scatter_reduce(self, dim, index, src, _OLD_NAMES[reduce])


@lowering(aten.scatter.value_reduce)
def scatter_value_reduce(self: Array, dim: int, index: Array, value: Scalar, reduce: str) -> Array:
    src = jnp.broadcast_to(dtypes.cast(value, self.dtype), index.shape)
    return scatter_reduce(self, dim, index, src, _OLD_NAMES[reduce])


@lowering(aten.scatter_reduce.two)
def scatter_reduce(self: Array, dim: int, index: Array, src: Array, reduce: str, include_self: bool = True) -> Array:
    x, at, src = _as_1d(self, index, src)
    if at.size == 0:
        return self
    return _reduce_into(False, wrap_dim(dim, x.ndim), reduce, include_self, x, at, _cut(src, at.shape)).reshape(self.shape)


@lowering(aten.index_reduce.default)
def index_reduce(self: Array, dim: int, index: Array, source: Array, reduce: str, include_self: bool = True) -> Array:
    x, at = _as_1d(self, index)
    if at.size == 0:
        return self
    source = source.reshape(rows(x, dim, at).shape)
    return _reduce_into(True, wrap_dim(dim, x.ndim), reduce, include_self, x, at, source).reshape(self.shape)


def _put(by_row: bool, dim: int, kind: str, x: Array, index: Array, src: Array) -> Array:
    return rows(x, dim, index).write(x, src, kind) if by_row else scatter_along(kind, x, dim, index, src)


def _get(by_row: bool, dim: int, x: Array, index: Array) -> Array:
    return rows(x, dim, index).read(x) if by_row else gather_along(x, dim, index)


def _identity(reduce: str, dtype: DType) -> float:
    """What a reduction starts from where `self` does not take part."""
    if reduce in ("sum", "mean", "prod"):
        return 1 if reduce == "prod" else 0
    if dtype == jnp.bool_:
        return reduce == "amin"
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.iinfo(dtype).min if reduce == "amax" else jnp.iinfo(dtype).max
    return -jnp.inf if reduce == "amax" else jnp.inf


@partial(jax.custom_jvp, nondiff_argnums=(0, 1, 2, 3))
def _reduce_into(by_row: bool, dim: int, reduce: str, include_self: bool, x: Array, index: Array, src: Array) -> Array:
    """`x` with `src` reduced into it, by slices (`index_reduce`) or elementwise (`scatter_reduce`)."""
    start = x
    if not include_self:
        start = _put(by_row, dim, "set", x, index, jnp.full(src.shape, _identity(reduce, x.dtype), x.dtype))
    if reduce != "mean":
        return _put(by_row, dim, reduce, start, index, src)
    total = _put(by_row, dim, "sum", start, index, src)
    count = _counts(by_row, dim, include_self, x, index, src)
    return total / count if jnp.issubdtype(x.dtype, jnp.inexact) else total // count


def _counts(by_row: bool, dim: int, include_self: bool, x: Array, index: Array, src: Array) -> Array:
    """How many numbers a mean is over, 1 where nothing was scattered."""
    base = jnp.ones_like(x) if include_self else jnp.zeros_like(x)
    return jnp.maximum(_put(by_row, dim, "sum", base, index, jnp.ones_like(src)), jnp.ones((), x.dtype))


@_reduce_into.defjvp
def _reduce_into_jvp(
    by_row: bool, dim: int, reduce: str, include_self: bool, primals: tuple[Array, ...], tangents: tuple[Array, ...]
) -> tuple[Array, Array]:
    """torch's gradient: ties of amax and amin share it evenly, and products with one zero factor are handled apart."""
    x, index, src = primals
    dx, _, dsrc = tangents
    out = _reduce_into(by_row, dim, reduce, include_self, x, index, src)
    weight_x, weight_src, scale = _weights(by_row, dim, reduce, include_self, x, index, src, out)
    if not include_self:
        weight_x = _put(by_row, dim, "set", weight_x, index, jnp.zeros_like(src))
    return out, _put(by_row, dim, "sum", weight_x * dx, index, weight_src * dsrc) * scale


def _weights(
    by_row: bool, dim: int, reduce: str, include_self: bool, x: Array, index: Array, src: Array, out: Array
) -> tuple[Array, Array, Array]:
    """The derivative of the result by `x` and by `src`, up to a factor per result."""
    one_x, one_src = jnp.ones_like(x), jnp.ones_like(src)
    if reduce == "sum":
        return one_x, one_src, one_x
    if reduce == "mean":
        return one_x, one_src, 1 / _counts(by_row, dim, include_self, x, index, src)
    if reduce == "prod":
        return *_product_weights(by_row, dim, include_self, x, index, src, out), one_x
    at_x = (x == out).astype(x.dtype)
    at_src = (src == _get(by_row, dim, out, index)).astype(x.dtype)
    ties = _put(by_row, dim, "sum", at_x, index, at_src)
    return at_x, at_src, 1 / jnp.maximum(ties, 1)


def _product_weights(by_row: bool, dim: int, include_self: bool, x: Array, index: Array, src: Array, out: Array) -> tuple[Array, Array]:
    safe_x = jnp.where(x == 0, 1, x)
    weight_x = _reduce_into(by_row, dim, "prod", include_self, safe_x, index, src) / safe_x
    zero = src == 0
    zeros = _put(by_row, dim, "sum", jnp.zeros_like(x), index, zero.astype(x.dtype))
    single = zero & (_get(by_row, dim, zeros, index) == 1)
    others = _reduce_into(by_row, dim, "prod", include_self, x, index, jnp.where(single, 1, src))
    by_division = _get(by_row, dim, out, index) / jnp.where(zero, 1, src)
    return weight_x, jnp.where(single, _get(by_row, dim, others, index), by_division)
