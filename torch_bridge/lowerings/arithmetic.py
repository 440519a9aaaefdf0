"""Arithmetic: add, sub, mul, div and its rounding modes, remainder, pow, and the fused forms addcmul, addcdiv, lerp."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax
from jax.custom_derivatives import SymbolicZero

from torch_bridge import _compat
from torch_bridge.ir import dtypes
from torch_bridge.lowerings.precision import common_dtype, convert, elementwise, is_complex, is_float, operand, opmath, round_to
from torch_bridge.lowerings.registry import lowering
from torch_bridge.lowerings.types import Array, Number, Operand, Scalar

aten = torch.ops.aten


def is_one(x: object) -> bool:
    return isinstance(x, (bool, int, float)) and x == 1


def _add_scaled(x: Operand, y: Operand, alpha: Scalar, sign: int) -> Array:
    """x + sign * alpha * y; torch rounds numbers and alpha to the dtype of the result first, also for half precision."""
    dtype = common_dtype(x, y)
    a, b = operand(x, dtype), operand(y, dtype)
    if not is_one(alpha):
        b = b * operand(alpha, dtype)
    return (jnp.add(a, b) if sign > 0 else jnp.subtract(a, b)).astype(dtype)


@lowering(aten.add.Tensor, aten.add.Scalar)
def add(self: Operand, other: Operand, alpha: Scalar = 1) -> Array:
    return _add_scaled(self, other, alpha, 1)


@lowering(aten.sub.Tensor, aten.sub.Scalar)
def sub(self: Operand, other: Operand, alpha: Scalar = 1) -> Array:
    return _add_scaled(self, other, alpha, -1)


@lowering(aten.rsub.Tensor, aten.rsub.Scalar)
def rsub(self: Operand, other: Operand, alpha: Scalar = 1) -> Array:
    return _add_scaled(other, self, alpha, -1)


@lowering(aten._add_relu.Tensor, aten._add_relu.Scalar)
def add_relu(self: Operand, other: Operand, alpha: Scalar = 1) -> Array:
    total = _add_scaled(self, other, alpha, 1)
    return jnp.where(total < 0, jnp.zeros_like(total), total)


@lowering(aten.mul.Tensor, aten.mul.Scalar)
def mul(self: Operand, other: Operand) -> Array:
    dtype = common_dtype(self, other)
    return jnp.multiply(operand(self, dtype), operand(other, dtype, exact=True)).astype(dtype)


@lowering(aten.div.Tensor, aten.div.Scalar)
def div(self: Operand, other: Operand) -> Array:
    dtype = common_dtype(self, other, floating=True)
    return jnp.true_divide(operand(self, dtype), operand(other, dtype, exact=True)).astype(dtype)


@lowering(aten.div.Tensor_mode, aten.div.Scalar_mode)
def div_mode(self: Operand, other: Operand, rounding_mode: str | None = None) -> Array:
    if rounding_mode is None:
        return div(self, other)
    dtype = common_dtype(self, other)
    a, b = lax.stop_gradient((operand(self, dtype), operand(other, dtype, exact=True)))
    if rounding_mode == "floor":
        return _floor_divide(a, b).astype(dtype)
    if is_float(a):
        # torch's half kernels for two tensors round the quotient before they truncate it; for a number they do not.
        quotient = a / b
        return jnp.trunc(quotient if b.ndim == 0 else round_to(quotient, dtype)).astype(dtype)
    return lax.div(*jnp.broadcast_arrays(a, b)) if dtype != jnp.bool_ else a & b


@lowering(aten.floor_divide.default, aten.floor_divide.Scalar)
def floor_divide(self: Operand, other: Operand) -> Array:
    return div_mode(self, other, rounding_mode="floor")


def _floor_divide(a: Array, b: Array) -> Array:
    """Python's floor division, with a / b where b is zero (floating point), as torch does."""
    if a.dtype == jnp.bool_:
        return a & b
    a, b = jnp.broadcast_arrays(a, b)
    if not is_float(a):
        quotient = lax.div(a, b)
        return jnp.where((lax.rem(a, b) != 0) & ((a < 0) != (b < 0)), quotient - 1, quotient)
    remainder = lax.rem(a, b)
    quotient = (a - remainder) / b
    quotient = jnp.where((remainder != 0) & ((b < 0) != (remainder < 0)), quotient - 1, quotient)
    floored = jnp.floor(quotient)
    floored = jnp.where(quotient - floored > 0.5, floored + 1, floored)
    floored = jnp.where(quotient != 0, floored, jnp.copysign(jnp.zeros_like(a), a / b))
    return jnp.where(b == 0, a / b, floored)


@lowering(aten.remainder.Tensor, aten.remainder.Scalar, aten.remainder.Scalar_Tensor)
def remainder(self: Operand, other: Operand) -> Array:
    def python_modulo(a: Array, b: Array) -> Array:
        a, b = jnp.broadcast_arrays(a, b)
        rest = lax.rem(a, b)
        return jnp.where((rest != 0) & ((rest < 0) != (b < 0)), rest + b, rest)

    return elementwise(python_modulo, self, other)


@lowering(aten.fmod.Tensor, aten.fmod.Scalar)
def fmod(self: Operand, other: Operand) -> Array:
    return elementwise(lambda a, b: lax.rem(*jnp.broadcast_arrays(a, b)), self, other)


@lowering(aten.pow.Tensor_Scalar, lift=False)
def pow_scalar(self: Operand, exponent: Number) -> Array:
    """The exponents that torch writes out (and XLA does not always) become multiplications, square roots and quotients."""
    dtype = common_dtype(self, exponent)
    x = operand(self, dtype)
    if exponent == 0:
        return jnp.ones_like(x, dtype=dtype)
    if dtype == jnp.bool_:
        return x
    if not is_float(x):
        return lax.integer_pow(x, int(exponent.real))
    if exponent == 0.5:
        result = jnp.sqrt(x)
    elif exponent == -0.5:
        result = 1 / jnp.sqrt(x)
    elif exponent in (1, 2, 3, -1, -2):
        result = _small_power(x, int(exponent.real), dtype)
    else:
        result = _float_pow(x, operand(exponent, dtype))
    return result.astype(dtype)


def _small_power(x: Array, n: int, dtype: np.dtype) -> Array:
    """x ** n by multiplication, rounding between the steps for half dtypes as torch does."""
    power = x
    for _ in range(abs(n) - 1):
        power = round_to(power * x, dtype)
    return power if n > 0 else 1 / power


@jax.custom_jvp
def _real_pow(x: Array, y: Array) -> Array:
    return lax.pow(x, y)


def _real_pow_jvp(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    """torch's gradients: 0 for the base where the exponent is 0, and 0 for the exponent where the base is 0 (lax has NaN)."""
    x, y = primals
    power, tangent = lax.pow(x, y), jnp.zeros_like(x)
    if not isinstance(tangents[0], SymbolicZero):
        slope = jnp.where(y == 0, jnp.zeros_like(x), y * lax.pow(x, jnp.where(y == 0, jnp.ones_like(y), y - 1)))
        tangent = tangent + tangents[0] * slope
    if not isinstance(tangents[1], SymbolicZero):
        flat = (x == 0) & (y >= 0)
        tangent = tangent + tangents[1] * jnp.where(flat, jnp.zeros_like(x), power * jnp.log(jnp.where(flat, jnp.ones_like(x), x)))
    return power, tangent


_real_pow.defjvp(_real_pow_jvp, symbolic_zeros=True)


def _float_pow(x: Array, y: Array) -> Array:
    x, y = jnp.broadcast_arrays(x, y)
    return _complex_pow(x, y) if is_complex(x) else _real_pow(x, y)


def _complex_pow(x: Array, y: Array) -> Array:
    """exp(y * log(x)), with C's powers of 0: 0 where y is on the right, infinite where it is on the left, else NaN. (XLA's are NaN.)"""
    zero, nan, inf = (jnp.asarray(v, x.dtype) for v in (0, complex(math.nan, math.nan), complex(math.inf, math.nan)))
    real = jnp.real(y)
    of_zero = jnp.where(real > 0, zero, jnp.where(real < 0, inf, nan))
    return jnp.where(x == 0, of_zero, lax.pow(jnp.where(x == 0, jnp.ones_like(x), x), y))


@lowering(aten.pow.Tensor_Tensor, aten.pow.Scalar)
def pow_tensor(self: Operand, exponent: Operand) -> Array:
    def power(x: Array, y: Array) -> Array:
        x, y = jnp.broadcast_arrays(x, y)
        return _float_pow(x, y) if is_float(x) else _integer_pow(x, y)

    return elementwise(power, self, exponent)


def _integer_pow(x: Array, y: Array) -> Array:
    """Wrapping integer power by squaring; a negative exponent gives 0 unless the base is 1 or -1, as in torch."""

    def step(_: int, state: tuple[Any, Any, Any]) -> tuple[Array, Array, Array]:
        result, base, left = state
        return jnp.where(left & 1 != 0, result * base, result), base * base, lax.shift_right_logical(left, jnp.ones_like(left))

    bits = 8 * x.dtype.itemsize
    power = lax.fori_loop(0, bits, step, (jnp.ones_like(x), x, y))[0]
    if jnp.issubdtype(x.dtype, jnp.unsignedinteger):
        return power
    minus_one = jnp.where(y & 1 != 0, -jnp.ones_like(x), jnp.ones_like(x))
    inverse = jnp.where(x == 1, jnp.ones_like(x), jnp.where(x == -1, minus_one, jnp.zeros_like(x)))
    return jnp.where(y < 0, inverse, power)


_SHIFTS_EXPONENTS = _compat.ldexp_keeps_dtype()


@lowering(aten.ldexp.Tensor)
def ldexp(self: Array, other: Array) -> Array:
    exponents = jnp.issubdtype(other.dtype, jnp.integer)
    if not (exponents and jnp.issubdtype(self.dtype, jnp.floating) and _SHIFTS_EXPONENTS):
        return mul(self, pow_tensor(2.0, other))
    dtype = common_dtype(self, other)
    exponent = other if other.dtype.itemsize > 4 else other.astype(jnp.int32)
    most = 4096  # of a float64 it is 2,098 from the smallest to the largest number
    return jnp.ldexp(operand(self, opmath(dtype)), jnp.clip(exponent, -most, most).astype(jnp.int32)).astype(dtype)


@lowering(aten.addcmul.default)
def addcmul(self: Array, tensor1: Array, tensor2: Array, value: Scalar = 1) -> Array:
    dtype = common_dtype(self, tensor1, tensor2)
    a, b, c = (operand(x, dtype) for x in (self, tensor1, tensor2))
    product = b * c if is_one(value) else convert(value, opmath(dtype)) * b * c
    return (a + product).astype(dtype)


@lowering(aten.addcdiv.default)
def addcdiv(self: Array, tensor1: Array, tensor2: Array, value: Scalar = 1) -> Array:
    dtype = common_dtype(self, tensor1, tensor2)
    a, b, c = (operand(x, dtype) for x in (self, tensor1, tensor2))
    quotient = b / c if is_one(value) else convert(value, opmath(dtype)) * b / c
    return (a + quotient).astype(dtype)


@lowering(aten.lerp.Scalar, aten.lerp.Tensor)
def lerp(self: Array, end: Operand, weight: Operand) -> Array:
    dtype = self.dtype if dtypes.is_number(weight) else common_dtype(self, end, weight)
    a, b = operand(self, dtype), operand(end, dtype)
    w = operand(weight, dtype, exact=True)
    difference = b - a
    # Two forms, so that the ends are hit exactly.
    return jnp.where(jnp.abs(w) < 0.5, a + w * difference, b - difference * (1 - w)).astype(dtype)
