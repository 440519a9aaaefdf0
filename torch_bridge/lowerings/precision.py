"""In which dtype an op computes: torch's "opmath" rule for half precision, and operands brought to one dtype.

torch computes float16 and bfloat16 ops in float32 and rounds the result once. XLA would round after every primitive, so
the lowerings widen first. Rounding an operand to half precision on the way (as type promotion asks for numbers) is done
with `lax.reduce_precision`: under jit XLA is free to drop a float32 -> bfloat16 -> float32 pair of converts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from torch_bridge.ir import dtypes
from torch_bridge.lowerings.types import Array, DType, Operand

_HALF = {jnp.dtype(jnp.float16): (5, 10), jnp.dtype(jnp.bfloat16): (8, 7)}


def is_complex(x: Array) -> bool:
    return jnp.issubdtype(x.dtype, jnp.complexfloating)


def is_float(x: Array) -> bool:
    """True for real and complex floating point arrays."""
    return jnp.issubdtype(x.dtype, jnp.inexact)


def opmath(dtype: DType) -> np.dtype:
    """The dtype torch computes in for tensors of `dtype`: float32 for float16 and bfloat16, else `dtype`."""
    dtype = jnp.dtype(dtype)
    return jnp.dtype(jnp.float32) if dtype in _HALF else dtype


def widen(x: Array) -> Array:
    return x.astype(opmath(x.dtype))


def round_to(x: Array, dtype: DType) -> Array:
    """A float32 `x` rounded to the precision of a half dtype, still float32 (or unchanged for other dtypes)."""
    bits = _HALF.get(jnp.dtype(dtype))
    return x if bits is None else lax.reduce_precision(x, *bits)


def convert(x: Operand, dtype: DType) -> Array:
    """`dtypes.cast` with C's conversions: float to a narrow or unsigned integer wraps (XLA saturates); halves round via float32."""
    dtype = jnp.dtype(dtype)
    x = x.value if isinstance(x, dtypes.Scalar) else x
    if isinstance(x, (bool, int)):
        return dtypes.cast(x, dtype)
    x = jnp.asarray(x)
    if is_complex(x) and jnp.issubdtype(dtype, jnp.integer):
        x = x.real
    if jnp.issubdtype(x.dtype, jnp.floating) and jnp.issubdtype(dtype, jnp.integer):
        return _to_integer(x, dtype)
    if dtype in _HALF and x.dtype not in _HALF and x.dtype != jnp.float32:
        x = dtypes.cast(x, jnp.float32)  # torch rounds twice
    return dtypes.cast(x, dtype)


def _to_integer(x: Array, dtype: np.dtype) -> Array:
    if dtype == jnp.uint64:
        return jnp.where(x < 0, x.astype(jnp.int64).astype(dtype), x.astype(dtype))
    if dtype == jnp.uint32:
        return x.astype(jnp.int64).astype(dtype)
    return x.astype(jnp.int32).astype(dtype) if dtype.itemsize < 4 else x.astype(dtype)


def operand(x: Operand, dtype: DType, exact: bool = False) -> Array:
    """`x` in the dtype that computes for `dtype`; `exact` keeps a number or 0-d tensor unrounded, as torch's `mul` and `div` do."""
    wide = opmath(dtype)
    if not dtypes.is_number(x) and x.dtype == dtype:
        return x.astype(wide)
    y = convert(x, wide)
    return y if exact and y.ndim == 0 else round_to(y, dtype)


def common_dtype(*operands: Operand | None, floating: bool = False) -> np.dtype:
    """torch's promoted dtype of the operands; with `floating`, integers and bools become the default float dtype."""
    dtype = dtypes.result_dtype(*operands)
    if floating and not (dtype.is_floating_point or dtype.is_complex):
        dtype = torch.get_default_dtype()
    return dtypes.to_jax(dtype)


def elementwise(fn: Callable[..., Any], *operands: Operand, floating: bool = False) -> Array:
    """`fn` on the operands in their common dtype, computed wide and rounded once to that dtype."""
    dtype = common_dtype(*operands, floating=floating)
    return fn(*(operand(x, dtype) for x in operands)).astype(dtype)
