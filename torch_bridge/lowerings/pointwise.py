"""Other elementwise ops of several operands: clamps, maxima, `where`, two-argument functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from torch_bridge.lowerings.precision import common_dtype, elementwise, is_float, operand
from torch_bridge.lowerings.registry import lowering
from torch_bridge.lowerings.types import Array, Operand

aten = torch.ops.aten


def _at_least(x: Array, bound: Array) -> Array:
    # Not lax.max: at the bound torch's gradient goes to x, and a NaN bound gives NaN.
    return jnp.where((x < bound) | (bound != bound), bound, x)


def _at_most(x: Array, bound: Array) -> Array:
    return jnp.where((x > bound) | (bound != bound), bound, x)


@lowering(aten.clamp.default, aten.clamp.Tensor)
def clamp(self: Operand, min: Operand | None = None, max: Operand | None = None) -> Array:
    dtype = common_dtype(self, min, max)
    x = operand(self, dtype)
    if min is not None:
        x = _at_least(x, operand(min, dtype))
    if max is not None:
        x = _at_most(x, operand(max, dtype))
    return x.astype(dtype)


@lowering(aten.clamp_min.default, aten.clamp_min.Tensor)
def clamp_min(self: Operand, min: Operand) -> Array:
    return elementwise(_at_least, self, min)


@lowering(aten.clamp_max.default, aten.clamp_max.Tensor)
def clamp_max(self: Operand, max: Operand) -> Array:
    return elementwise(_at_most, self, max)


@lowering(aten.maximum.default)
def maximum(self: Operand, other: Operand) -> Array:
    return elementwise(jnp.maximum, self, other)


@lowering(aten.minimum.default)
def minimum(self: Operand, other: Operand) -> Array:
    return elementwise(jnp.minimum, self, other)


@lowering(aten.fmax.default)
def fmax(self: Operand, other: Operand) -> Array:
    return elementwise(lambda a, b: jnp.where((a >= b) | (b != b), a, b), self, other)


@lowering(aten.fmin.default)
def fmin(self: Operand, other: Operand) -> Array:
    return elementwise(lambda a, b: jnp.where((a <= b) | (b != b), a, b), self, other)


@lowering(aten.where.self)
def where(condition: Array, self: Operand, other: Operand) -> Array:
    dtype = common_dtype(self, other)
    condition = condition if condition.dtype == jnp.bool_ else condition != 0
    return jnp.where(condition, operand(self, dtype), operand(other, dtype)).astype(dtype)


def _xlogy(x: Array, y: Array) -> Array:
    # 0 * log(y) is 0 for every y but NaN. The replaced y keeps the gradient log(y) at x = 0 where it is finite.
    degenerate = (x == 0) & ((y <= 0) | (y == jnp.inf))
    return x * jnp.log(jnp.where(degenerate, jnp.ones_like(y), y))


@lowering(aten.xlogy.Tensor, aten.xlogy.Scalar_Self, aten.xlogy.Scalar_Other)
def xlogy(self: Operand, other: Operand) -> Array:
    return elementwise(_xlogy, self, other, floating=True)


def _hypot(x: Array, y: Array) -> Array:
    # inf wins over NaN (C99); jnp.hypot scales, so that large values do not overflow.
    return jnp.where(jnp.isinf(x) | jnp.isinf(y), jnp.full_like(x + y, jnp.inf), jnp.hypot(x, y))


@lowering(aten.heaviside.default)
def heaviside(self: Operand, values: Operand) -> Array:
    return elementwise(lambda x, v: jnp.where(x == 0, v, (x > 0).astype(v.dtype)), self, values)


@lowering(aten.nextafter.default)
def nextafter(self: Array, other: Array) -> Array:
    dtype = common_dtype(self, other)
    return lax.nextafter(*jnp.broadcast_arrays(self.astype(dtype), other.astype(dtype)))


def _copysign(x: Array, y: Array) -> Array:
    magnitude = jnp.abs(x)
    return jnp.where(jnp.signbit(y), -magnitude, magnitude)


@lowering(aten.copysign.Tensor, aten.copysign.Scalar)
def copysign(self: Operand, other: Operand) -> Array:
    return elementwise(_copysign, self, other, floating=True)


def _gcd(x: Array, y: Array) -> Array:
    """Euclid's steps, as torch's CPU kernel takes them. With the smallest integer, which has a negative absolute value, `jnp.gcd` does not end."""

    def step(pair: tuple[Array, Array]) -> tuple[Array, Array]:
        divisor, rest = pair
        going = divisor != 0
        remainder = lax.rem(rest, jnp.where(going, divisor, jnp.ones_like(divisor)))
        return jnp.where(going, remainder, divisor), jnp.where(going, divisor, rest)

    first, second = jnp.broadcast_arrays(jnp.abs(x), jnp.abs(y))
    return lax.while_loop(lambda pair: (pair[0] != 0).any(), step, (first, second))[1]


def _lcm(x: Array, y: Array) -> Array:
    divisor = _gcd(x, y)
    wide = jnp.int32 if x.dtype.itemsize < 4 else x.dtype  # C computes so, and rounds once
    none = divisor == 0
    parts = lax.div(jnp.broadcast_to(x, divisor.shape).astype(wide), jnp.where(none, jnp.ones_like(divisor), divisor).astype(wide))
    return jnp.where(none, jnp.zeros_like(divisor), jnp.abs(parts * y.astype(wide)).astype(x.dtype))


def _register(op: torch._ops.OpOverload, fn: Callable[..., Any], floating: bool) -> None:
    @lowering(op)
    def binary(self: Operand, other: Operand) -> Array:
        return elementwise(fn, self, other, floating=floating)


for _op, _fn, _floating in (
    (aten.atan2.default, jnp.arctan2, True),
    (aten.hypot.default, _hypot, False),
    (aten.logaddexp.default, jnp.logaddexp, True),
    (aten.logaddexp2.default, jnp.logaddexp2, True),
    (aten.gcd.default, _gcd, False),
    (aten.lcm.default, _lcm, False),
):
    _register(_op, _fn, _floating)


@lowering(aten.nan_to_num.default)
def nan_to_num(self: Array, nan: float | None = None, posinf: float | None = None, neginf: float | None = None) -> Array:
    if not is_float(self):
        return self
    if jnp.iscomplexobj(self):
        return lax.complex(nan_to_num(self.real, nan, posinf, neginf), nan_to_num(self.imag, nan, posinf, neginf))
    limits = jnp.finfo(self.dtype)

    def number(value: float | None, default: float | np.floating) -> Array:
        return jnp.asarray(default if value is None else value, self.dtype)

    x = jnp.where(jnp.isnan(self), number(nan, 0), self)
    x = jnp.where(self == jnp.inf, number(posinf, limits.max), x)
    return jnp.where(self == -jnp.inf, number(neginf, limits.min), x)
