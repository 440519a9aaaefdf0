"""Tensors from sizes and numbers: `arange`, `full`, `eye`, `linspace`, ... (`*_like` and `new_*` stand with the pointwise ops).

Ranges are an iota and a multiply-add, never a constant in the program.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from torch_bridge.ir import dtypes
from torch_bridge.lowerings.registry import lowering
from torch_bridge.lowerings.types import Array, Operand, Scalar

aten = torch.ops.aten


def _default(dtype: torch.dtype | None) -> np.dtype:
    return dtypes.to_jax(dtype or torch.get_default_dtype())


@lowering(aten.arange.default, lift=False)
def arange(end: float, dtype: torch.dtype | None = None) -> Array:
    return arange_start_step(0, end, 1, dtype=dtype)


@lowering(aten.arange.start, lift=False)
def arange_start(start: float, end: float, dtype: torch.dtype | None = None) -> Array:
    return arange_start_step(start, end, 1, dtype=dtype)


@lowering(aten.arange.start_step, lift=False)
def arange_start_step(start: float, end: float, step: float = 1, dtype: torch.dtype | None = None) -> Array:
    """int64 if all numbers are ints, else the default float; the length is exact for int64 and computed in float64 else."""
    if dtype is None:
        dtype = torch.get_default_dtype() if any(isinstance(v, float) for v in (start, end, step)) else torch.int64
    if dtype == torch.int64:
        start, end, step = int(start), int(end), int(step)
        size = -((start - end) // step)
    else:
        size = math.ceil((float(end) - float(start)) / float(step))
    return _ramp(start, step, max(size, 0), dtype)


@lowering(aten.range.step, lift=False)
def range_step(start: float, end: float, step: float = 1, dtype: torch.dtype | None = None) -> Array:
    """The deprecated `torch.range`: its end is included and its default dtype is the float one."""
    size = math.floor((float(end) - float(start)) / float(step)) + 1
    return _ramp(start, step, size, dtype or torch.get_default_dtype())


@lowering(aten.range.default, lift=False)
def range_default(start: float, end: float, dtype: torch.dtype | None = None) -> Array:
    return range_step(start, end, 1, dtype)


def _ramp(start: float, step: float, size: int, dtype: torch.dtype) -> Array:
    """start + i * step, computed as torch does: in float64 for floats, in int64 (truncating both numbers) for integers."""
    if dtype.is_floating_point:
        ramp = lax.iota(jnp.float64, size) * float(step) + float(start)
    else:
        ramp = lax.iota(jnp.int64, size) * int(step) + int(start)
    return ramp.astype(dtypes.to_jax(dtype))


@lowering(aten.full.default)
def full(size: Sequence[int], fill_value: Scalar, dtype: torch.dtype | None = None) -> Array:
    """Without a dtype the number's own: bool, int64, the default float or complex."""
    target = dtypes.to_jax(dtype or dtypes.result_dtype(fill_value))
    return jnp.full(tuple(size), dtypes.cast(fill_value, target))


@lowering(aten.scalar_tensor.default)
def scalar_tensor(s: Scalar, dtype: torch.dtype | None = None) -> Array:
    return dtypes.cast(s, _default(dtype))


@lowering(aten.zeros.default, aten.empty.memory_format)
def zeros(size: Sequence[int], dtype: torch.dtype | None = None) -> Array:
    return jnp.zeros(tuple(size), _default(dtype))


@lowering(aten.empty_strided.default)
def empty_strided(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype | None = None) -> Array:
    return jnp.zeros(tuple(size), _default(dtype))


@lowering(aten.empty_permuted.default)
def empty_permuted(size: Sequence[int], physical_layout: Sequence[int], dtype: torch.dtype | None = None) -> Array:
    return jnp.zeros(tuple(size), _default(dtype))


@lowering(aten.ones.default)
def ones(size: Sequence[int], dtype: torch.dtype | None = None) -> Array:
    return jnp.ones(tuple(size), _default(dtype))


@lowering(aten.eye.default)
def eye(n: int, dtype: torch.dtype | None = None) -> Array:
    return jnp.eye(n, dtype=_default(dtype))


@lowering(aten.eye.m)
def eye_m(n: int, m: int, dtype: torch.dtype | None = None) -> Array:
    return jnp.eye(n, m, dtype=_default(dtype))


@lowering(aten.tril_indices.default)
def tril_indices(row: int, col: int, offset: int = 0, dtype: torch.dtype | None = torch.int64) -> Array:
    return jnp.asarray(np.stack(np.tril_indices(row, offset, col)).astype(dtypes.to_jax(dtype or torch.int64)))


@lowering(aten.triu_indices.default)
def triu_indices(row: int, col: int, offset: int = 0, dtype: torch.dtype | None = torch.int64) -> Array:
    return jnp.asarray(np.stack(np.triu_indices(row, offset, col)).astype(dtypes.to_jax(dtype or torch.int64)))


def _line(start: Operand, end: Operand, steps: int, dtype: np.dtype) -> Array:
    """`linspace` in the precision torch steps in: float64 for integers, float32 inside for the 16-bit types."""
    if jnp.issubdtype(dtype, jnp.integer):
        work, start, end = jnp.float64, dtypes.cast(start, dtype), dtypes.cast(end, dtype)
    else:
        work = jnp.float32 if dtype.itemsize == 2 else dtype
    first, last = dtypes.cast(start, work), dtypes.cast(end, work)
    if steps < 2:
        return jnp.full((steps,), first)
    step = (last - first) / jnp.asarray(steps - 1, work)
    i = lax.iota(jnp.int64, steps)
    ahead, behind = first + step * i.astype(work), last - step * (steps - 1 - i).astype(work)
    return jnp.where(i < steps // 2, ahead, behind)


def _line_dtype(start: Operand, end: Operand, dtype: torch.dtype | None) -> np.dtype:
    if dtype is None:
        kinds = [dtypes.result_dtype(v) for v in (start, end)]
        default = torch.get_default_dtype()
        dtype = default.to_complex() if any(k.is_complex for k in kinds) else default
    return dtypes.to_jax(dtype)


@lowering(aten.linspace.default, aten.linspace.Tensor_Tensor, aten.linspace.Tensor_Scalar, aten.linspace.Scalar_Tensor)
def linspace(start: Operand, end: Operand, steps: int, dtype: torch.dtype | None = None) -> Array:
    target = _line_dtype(start, end, dtype)
    return _line(start, end, steps, target).astype(target)


@lowering(aten.logspace.default, aten.logspace.Tensor_Tensor, aten.logspace.Tensor_Scalar, aten.logspace.Scalar_Tensor)
def logspace(start: Operand, end: Operand, steps: int, base: float = 10.0, dtype: torch.dtype | None = None) -> Array:
    """Powers are taken in double precision, as torch's CPU kernel does."""
    target = _line_dtype(start, end, dtype)
    line = _line(start, end, steps, target)
    wide = jnp.complex128 if jnp.issubdtype(target, jnp.complexfloating) else jnp.float64
    return jnp.power(jnp.asarray(base, wide), line.astype(wide)).astype(target)
