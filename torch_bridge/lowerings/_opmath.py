"""How wide torch computes: bfloat16 and float16 ops run in float32 inside and round once at the end."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from torch_bridge.ir import dtypes
from torch_bridge.lowerings.types import DType

HALF = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))


def wide_dtype(dtype: DType) -> np.dtype:
    """The dtype that arithmetic on `dtype` runs in (torch's opmath type)."""
    dtype = jnp.dtype(dtype)
    return jnp.dtype(jnp.float32) if dtype in HALF else dtype


def widen(x: jax.Array | None) -> Any:
    """An array in its opmath dtype; None stays None."""
    return None if x is None else x.astype(wide_dtype(x.dtype))


def is_array(x: object) -> bool:
    """True for a JAX array, as opposed to numbers, `Scalar`s, dtypes, strings and None."""
    return isinstance(x, (jax.Array, np.ndarray))


def pointwise(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Call `fn` with its array arguments promoted to their common dtype and widened; results are rounded back to that dtype."""

    @functools.wraps(fn)
    def run(*args: Any, **kwargs: Any) -> Any:
        arrays = [a for a in (*args, *kwargs.values()) if is_array(a)]
        dtype = dtypes.to_jax(dtypes.result_dtype(*arrays))
        wide = wide_dtype(dtype)

        def prepare(x: Any) -> Any:
            return dtypes.cast(x, wide) if is_array(x) else x

        out = fn(*map(prepare, args), **{k: prepare(v) for k, v in kwargs.items()})
        return jax.tree.map(lambda o: o.astype(dtype), out)

    return run
