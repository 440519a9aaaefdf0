"""Cumulative sums, products, extrema and log-sums along one dim."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import torch
from jax import lax

from torch_bridge.lowerings.precision import is_complex, is_float, widen
from torch_bridge.lowerings.reductions import accumulator
from torch_bridge.lowerings.registry import lowering
from torch_bridge.lowerings.types import Array

aten = torch.ops.aten


def _along(fn: Callable[[Any, int], Any], x: Array, dim: int) -> Array:
    """fn(x, axis), with a 0-d x as one element; an empty x is its own scan."""
    if x.size == 0:
        return x
    return fn(x.reshape(1), 0).reshape(()) if x.ndim == 0 else fn(x, dim % x.ndim)


@lowering(aten.cumsum.default)
def cumsum(self: Array, dim: int, dtype: torch.dtype | None = None) -> Array:
    x, result = accumulator(self, dtype)
    return _along(lax.cumsum, x, dim).astype(result)


@lowering(aten.cumprod.default)
def cumprod(self: Array, dim: int, dtype: torch.dtype | None = None) -> Array:
    x, result = accumulator(self, dtype)
    return _along(lax.cumprod, x, dim).astype(result)


@lowering(aten.logcumsumexp.default, aten._logcumsumexp.default)
def logcumsumexp(self: Array, dim: int) -> Array:
    if is_complex(self):
        raise NotImplementedError("logcumsumexp: complex input has no lowering on device 'xla'; use x.exp().cumsum(dim).log() instead")
    return _along(lax.cumlogsumexp, widen(self), dim).astype(self.dtype)


def _register_cumulative_extremum(op: torch._ops.OpOverloadPacket, scan: Callable[..., Any]) -> None:
    """The index is the latest position of the running extremum: equal values and NaNs move it on, nothing follows a NaN."""

    @lowering(op.default)
    def cumulative(self: Array, dim: int) -> tuple[Array, Array]:
        if self.ndim == 0:
            return self, jnp.zeros((), jnp.int64)
        if self.size == 0:
            return self, jnp.zeros(self.shape, jnp.int64)
        axis = dim % self.ndim
        x = lax.stop_gradient(self)
        x = x.astype(jnp.uint8) if x.dtype == jnp.bool_ else x
        hit = x == scan(x, axis)
        hit = hit | (x != x) if is_float(x) else hit
        position = lax.broadcasted_iota(jnp.int64, x.shape, axis)
        index = lax.cummax(jnp.where(hit, position, 0), axis)
        return jnp.take_along_axis(self, index, axis=axis, mode="promise_in_bounds"), index


_register_cumulative_extremum(aten.cummax, lax.cummax)
_register_cumulative_extremum(aten.cummin, lax.cummin)
