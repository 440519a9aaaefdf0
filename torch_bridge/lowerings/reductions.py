"""Sums, products, moments, norms and truth over dims.

Half precision accumulates in float32 and rounds once, as torch does.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from torch_bridge.ir import dtypes
from torch_bridge.lowerings.comparison import truth
from torch_bridge.lowerings.precision import convert, is_complex, is_float, opmath, round_to, widen
from torch_bridge.lowerings.registry import lowering
from torch_bridge.lowerings.types import Array, Dims, DType, Scalar

aten = torch.ops.aten


def axes(dim: Dims | None, ndim: int, empty_is_all: bool = True) -> tuple[int, ...]:
    """torch's `dim` argument as non-negative axes: None (and mostly the empty list too) means all; 0-d tensors have none."""
    if dim is None or (empty_is_all and not isinstance(dim, int) and len(dim) == 0):
        return tuple(range(ndim))
    dims = (dim,) if isinstance(dim, int) else tuple(dim)
    return tuple(d % ndim for d in dims) if ndim else ()


def accumulator(x: Array, dtype: torch.dtype | None, integers_to: DType = jnp.int64) -> tuple[Array, np.dtype]:
    """x as sum and prod accumulate it, and the dtype of the result."""
    if dtype is not None:
        result = dtypes.to_jax(dtype)
    else:
        result = x.dtype if is_float(x) else jnp.dtype(integers_to)
    if x.dtype == result:
        return widen(x), result
    return round_to(convert(x, opmath(result)), result), result


@lowering(aten.sum.default, aten.sum.dim_IntList, batches=True)
def sum_(self: Array, dim: Dims | None = None, keepdim: bool = False, dtype: torch.dtype | None = None) -> Array:
    x, result = accumulator(self, dtype)
    return jnp.sum(x, axis=axes(dim, x.ndim), keepdims=keepdim, dtype=x.dtype).astype(result)


@lowering(aten.nansum.default)
def nansum(self: Array, dim: Dims | None = None, keepdim: bool = False, dtype: torch.dtype | None = None) -> Array:
    x = jnp.where(self != self, jnp.zeros_like(self), self) if is_float(self) else self
    return sum_(x, dim, keepdim, dtype)


@lowering(aten.mean.default, aten.mean.dim)
def mean(self: Array, dim: Dims | None = None, keepdim: bool = False, dtype: torch.dtype | None = None) -> Array:
    x, result = accumulator(self, dtype)
    reduced = axes(dim, x.ndim)
    total = jnp.sum(x, axis=reduced, keepdims=keepdim, dtype=x.dtype)
    return (total / jnp.asarray(_count(x, reduced), x.dtype)).astype(result)


def _count(x: Array, reduced: tuple[int, ...]) -> int:
    return math.prod(x.shape[d] for d in reduced)


@lowering(aten.prod.default, aten.prod.dim_int)
def prod(self: Array, dim: int | None = None, keepdim: bool = False, dtype: torch.dtype | None = None) -> Array:
    x, result = accumulator(self, dtype)
    return jnp.prod(x, axis=axes(dim, x.ndim), keepdims=keepdim, dtype=x.dtype).astype(result)


@lowering(aten.trace.default)
def trace(self: Array) -> Array:
    return sum_(jnp.diagonal(self))


@lowering(aten.count_nonzero.default, aten.count_nonzero.dim_IntList)
def count_nonzero(self: Array, dim: Dims | None = None) -> Array:
    return jnp.sum(truth(self), axis=axes(dim, self.ndim), dtype=jnp.int64)


def _register_truth(op: torch._ops.OpOverloadPacket, reduce: Callable[..., Any]) -> None:
    """`any` or `all`. uint8 stays uint8, and an empty list of dims reduces nothing (here only)."""

    @lowering(op.default, batches=True)
    @lowering(op.dim, op.dims)
    def reduction(self: Array, dim: Dims | None = None, keepdim: bool = False) -> Array:
        result = reduce(truth(self), axis=axes(dim, self.ndim, empty_is_all=False), keepdims=keepdim)
        return result.astype(jnp.uint8) if self.dtype == jnp.uint8 else result


_register_truth(aten.any, jnp.any)
_register_truth(aten.all, jnp.all)


@lowering(aten._is_all_true.default)
def is_all_true(self: Array) -> Array:
    return jnp.all(self)


@lowering(aten._is_any_true.default)
def is_any_true(self: Array) -> Array:
    return jnp.any(self)


def safe_sqrt(x: Array) -> Array:
    """sqrt of x >= 0 whose gradient at 0 is 0, torch's choice for std and norms (not for sqrt itself)."""
    zero = x == 0
    return jnp.where(zero, jnp.zeros_like(x), jnp.sqrt(jnp.where(zero, jnp.ones_like(x), x)))


def _moments(x: Array, dim: Dims | None, correction: Scalar | None, keepdim: bool) -> tuple[Array, Array]:
    """Variance and mean, in two passes over the widened x. The divisor stops at 0, which gives inf or NaN."""
    reduced = axes(dim, x.ndim)
    count = _count(x, reduced)
    center = jnp.sum(x, axis=reduced, keepdims=True, dtype=x.dtype) / jnp.asarray(count, x.dtype)
    distance = x - center
    squares = distance.real**2 + distance.imag**2 if is_complex(x) else distance * distance
    degrees = jnp.maximum(count - dtypes.cast(1 if correction is None else correction, squares.dtype), 0)
    variance = jnp.sum(squares, axis=reduced, keepdims=keepdim, dtype=squares.dtype) / degrees
    return variance, center if keepdim else jnp.squeeze(center, reduced)


def _real_dtype(x: Array) -> np.dtype:
    return x.real.dtype if is_complex(x) else x.dtype


@lowering(aten.var.correction)
def var(self: Array, dim: Dims | None = None, correction: Scalar | None = None, keepdim: bool = False) -> Array:
    return _moments(widen(self), dim, correction, keepdim)[0].astype(_real_dtype(self))


@lowering(aten.std.correction)
def std(self: Array, dim: Dims | None = None, correction: Scalar | None = None, keepdim: bool = False) -> Array:
    return safe_sqrt(_moments(widen(self), dim, correction, keepdim)[0]).astype(_real_dtype(self))


@lowering(aten.var_mean.correction)
def var_mean(self: Array, dim: Dims | None = None, correction: Scalar | None = None, keepdim: bool = False) -> tuple[Array, Array]:
    variance, center = _moments(widen(self), dim, correction, keepdim)
    return variance.astype(_real_dtype(self)), center.astype(self.dtype)


@lowering(aten.std_mean.correction)
def std_mean(self: Array, dim: Dims | None = None, correction: Scalar | None = None, keepdim: bool = False) -> tuple[Array, Array]:
    variance, center = _moments(widen(self), dim, correction, keepdim)
    return safe_sqrt(variance).astype(_real_dtype(self)), center.astype(self.dtype)


@lowering(aten.logsumexp.default)
def logsumexp(self: Array, dim: Dims, keepdim: bool = False) -> Array:
    x = widen(self) if is_float(self) else convert(self, dtypes.to_jax(torch.get_default_dtype()))
    result = self.dtype if is_float(self) else x.dtype
    reduced = axes(dim, x.ndim)
    peak = lax.stop_gradient(jnp.max(x.real, axis=reduced, keepdims=True, initial=-jnp.inf))
    peak = jnp.where(jnp.isfinite(peak), peak, jnp.zeros_like(peak))
    total = jnp.log(jnp.sum(jnp.exp(x - peak), axis=reduced, keepdims=True)) + peak
    return (total if keepdim else jnp.squeeze(total, reduced)).astype(result)
