"""Values that XLA stores: functions that stay calls in what it compiles, each a loop of its own, instead of being computed wherever their results are read."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from torch_bridge import _compat
from torch_bridge.lowerings.types import Array

FEWEST = 1024
"""Elements from which on a loop of its own pays."""
LARGEST = 3 << 20
"""Elements of a transpose up to which it pays: larger ones no longer fit into caches."""
NARROWEST = 8
"""Columns, or rows, of a transpose from which on it pays."""


def call(fn: Callable[..., Any], *args: Any) -> Any:
    """`fn(*args)`, stored. fn: a function that lives as long as the process, as it is traced once for each shape."""
    with _compat.not_inlined():
        return _jitted(fn)(*args)


def on_cpus(fn: Callable[..., Any], *args: Any) -> Any:
    """The same, on CPUs; elsewhere, and outside of traced functions, just `fn(*args)`."""
    if not any(isinstance(x, jax.core.Tracer) for x in args):
        return fn(*args)
    return lax.platform_dependent(*args, cpu=functools.partial(call, fn), default=fn)


def transposed(x: Array) -> Array:
    """The transpose of a matrix that is the first operand of a product; on CPUs stored, if that pays."""
    if not pays(x.shape):
        return x.T
    return on_cpus(jnp.transpose, x)


def pays(shape: Sequence[int]) -> bool:
    """Whether transposing a matrix first makes a product faster on CPUs that would read it down its columns."""
    rows, columns = shape
    return FEWEST <= rows * columns <= LARGEST and min(rows, columns) >= NARROWEST


@functools.lru_cache(maxsize=1024)
def _jitted(fn: Callable[[Any], Any]) -> Any:
    return jax.jit(fn)
