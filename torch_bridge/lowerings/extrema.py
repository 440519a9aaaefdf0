"""Minima, maxima and order statistics, with torch's rules for ties and NaN.

`max.dim` and relatives take the first of equal values and the first NaN, and send the gradient to that element;
`amax`, `max()` and relatives share it among ties. `median` and `kthvalue` give the index of the stable sort.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import torch
from jax import lax

from torch_bridge.lowerings.precision import is_float
from torch_bridge.lowerings.reductions import axes
from torch_bridge.lowerings.registry import lowering
from torch_bridge.lowerings.types import Array, Dims

aten = torch.ops.aten


def take(x: Array, index: Array, dim: int, keepdim: bool) -> Array:
    """x at `index` (with dim kept) along dim."""
    values = jnp.take_along_axis(x, index, axis=dim, mode="promise_in_bounds")
    return values if keepdim else jnp.squeeze(values, dim)


def select(x: Array, index: Array, dim: int, keepdim: bool) -> tuple[Array, Array]:
    """(values, indices) of a reduction of dim, from indices that still have dim."""
    return take(x, index, dim, keepdim), index if keepdim else jnp.squeeze(index, dim)


def _scalar_pair(x: Array) -> tuple[Array, Array]:
    return x, jnp.zeros((), jnp.int64)


def _arg(fn: Callable[..., Any], x: Array, dim: int) -> Array:
    """First index of the extremum, int64, dim kept; bools as integers."""
    x = x.astype(jnp.uint8) if x.dtype == jnp.bool_ else x
    return lax.expand_dims(fn(lax.stop_gradient(x), dim, jnp.int64), (dim,))


def _register_extremum(
    op: torch._ops.OpOverloadPacket,
    amop: torch._ops.OpOverloadPacket,
    argop: torch._ops.OpOverloadPacket,
    reduce: Callable[..., Any],
    arg: Callable[..., Any],
) -> None:
    @lowering(amop.default)
    def along(self: Array, dim: Dims = (), keepdim: bool = False) -> Array:
        return reduce(self, axis=axes(dim, self.ndim), keepdims=keepdim)

    @lowering(op.default)
    def whole(self: Array) -> Array:
        return reduce(self)

    @lowering(op.dim)
    def with_index(self: Array, dim: int, keepdim: bool = False) -> tuple[Array, Array]:
        if self.ndim == 0:
            return _scalar_pair(self)
        return select(self, _arg(arg, self, dim % self.ndim), dim % self.ndim, keepdim)

    @lowering(argop.default)
    def index(self: Array, dim: int | None = None, keepdim: bool = False) -> Array:
        if self.ndim == 0:
            return jnp.zeros((), jnp.int64)
        if dim is None:
            found = _arg(arg, self.reshape(-1), 0)
            return found.reshape((1,) * self.ndim if keepdim else ())
        found = _arg(arg, self, dim % self.ndim)
        return found if keepdim else jnp.squeeze(found, dim % self.ndim)


_register_extremum(aten.max, aten.amax, aten.argmax, jnp.max, lax.argmax)
_register_extremum(aten.min, aten.amin, aten.argmin, jnp.min, lax.argmin)


@lowering(aten.aminmax.default, aten._aminmax.default, aten._aminmax.dim)
def aminmax(self: Array, dim: int | None = None, keepdim: bool = False) -> tuple[Array, Array]:
    reduced = axes(dim, self.ndim)
    return jnp.min(self, axis=reduced, keepdims=keepdim), jnp.max(self, axis=reduced, keepdims=keepdim)


def _stable_order(x: Array, dim: int) -> tuple[Array, Array]:
    """x sorted along dim (NaN last) and where each value was."""
    position = lax.broadcasted_iota(jnp.int64, x.shape, dim)
    values, order = lax.sort((lax.stop_gradient(x), position), dimension=dim, is_stable=True, num_keys=1)
    return values, order


def _is_nan(x: Array) -> Array:
    return x != x if is_float(x) else jnp.zeros(x.shape, jnp.bool_)


def _median_index(x: Array, dim: int, ignore_nan: bool) -> Array:
    """Index (dim kept) of the lower median; without `ignore_nan` the first NaN wins."""
    nan = _is_nan(x)
    nan_count = jnp.sum(nan, axis=dim, keepdims=True, dtype=jnp.int64)
    numbers = x.shape[dim] - nan_count
    middle = jnp.maximum(numbers - 1, 0) // 2
    if not ignore_nan:
        middle = jnp.where(nan_count > 0, numbers, middle)  # NaNs come last, in order
    return jnp.take_along_axis(_stable_order(x, dim)[1], middle, axis=dim, mode="promise_in_bounds")


def _register_median(op: torch._ops.OpOverloadPacket, ignore_nan: bool) -> None:
    @lowering(op.default)
    def whole(self: Array) -> Array:
        flat = self.reshape(-1)
        if flat.shape[0] == 0:
            return jnp.full((), jnp.nan, self.dtype) if is_float(self) else jnp.full((), jnp.iinfo(self.dtype).min, self.dtype)
        return take(flat, _median_index(flat, 0, ignore_nan), 0, keepdim=False)

    @lowering(op.dim)
    def along(self: Array, dim: int, keepdim: bool = False) -> tuple[Array, Array]:
        if self.ndim == 0:
            return _scalar_pair(self)
        return select(self, _median_index(self, dim % self.ndim, ignore_nan), dim % self.ndim, keepdim)


_register_median(aten.median, ignore_nan=False)
_register_median(aten.nanmedian, ignore_nan=True)


@lowering(aten.kthvalue.default)
def kthvalue(self: Array, k: int, dim: int = -1, keepdim: bool = False) -> tuple[Array, Array]:
    if self.ndim == 0:
        return _scalar_pair(self)
    dim = dim % self.ndim
    order = _stable_order(self, dim)[1]
    return select(self, lax.slice_in_dim(order, k - 1, k, axis=dim), dim, keepdim)


@lowering(aten.mode.default)
def mode(self: Array, dim: int = -1, keepdim: bool = False) -> tuple[Array, Array]:
    """The smallest of the most frequent values, at its last position.

    NaNs count as different values and as the largest; torch's own answer for a row with NaN depends on their order.
    """
    if self.ndim == 0:
        return _scalar_pair(self)
    dim = dim % self.ndim
    values, order = _stable_order(self, dim)
    position = lax.broadcasted_iota(jnp.int64, self.shape, dim)
    before = lax.slice_in_dim(values, 0, values.shape[dim] - 1, axis=dim)
    after = lax.slice_in_dim(values, 1, values.shape[dim], axis=dim)
    first = lax.slice_in_dim(jnp.ones(values.shape, jnp.bool_), 0, 1, axis=dim)
    starts = jnp.where(jnp.concatenate([first, before != after], axis=dim), position, 0)
    run_length = position - lax.cummax(starts, axis=dim)
    best = _arg(lax.argmax, run_length, dim)
    return select(self, jnp.take_along_axis(order, best, axis=dim, mode="promise_in_bounds"), dim, keepdim)
