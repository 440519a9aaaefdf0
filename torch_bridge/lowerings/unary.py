"""Elementwise functions of one tensor."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jax.scipy.special
import torch
from jax import lax

from torch_bridge.lowerings.precision import elementwise, is_complex, is_float, opmath, widen
from torch_bridge.lowerings.registry import lowering
from torch_bridge.lowerings.types import Array

aten = torch.ops.aten


def _register_float(op: torch._ops.OpOverload, fn: Callable[[Any], Any]) -> None:
    """Integers become the default float dtype; half precision is computed in float32."""

    @lowering(op)
    def unary(self: Array) -> Array:
        return elementwise(fn, self, floating=True)


def _digamma(x: Array) -> Array:
    """lax gives NaN at the zeros; torch (and C) give minus infinity with the sign of the zero, and NaN at minus infinity."""
    return jnp.where(x == 0, jnp.copysign(jnp.full_like(x, jnp.inf), -x), lax.digamma(x))


def _rsqrt(x: Array) -> Array:
    return 1 / jnp.sqrt(x) if is_complex(x) else lax.rsqrt(x)


def _exp2(x: Array) -> Array:
    # Exact at integers, which exp(x * log(2)) is not.
    return jnp.exp2(x) if is_complex(x) else lax.pow(jnp.full_like(x, 2), x)


def _log_base(base: float) -> Callable[[Any], Any]:
    """log(x) / log(base), exact where x is a whole power of the base, as C's log2 and log10 are.

    Programs take floor(log2(x)); one rounding below 3.0 would make that 2.
    """

    def log(x: Array) -> Array:
        if is_complex(x):  # part by part: an infinity times a complex number is NaN
            found = jnp.log(x)
            return lax.complex(found.real / math.log(base), found.imag / math.log(base))
        result = jnp.log(x) / jnp.asarray(math.log(base), x.dtype)
        fixed = lax.stop_gradient(result)
        whole = jnp.round(fixed)
        exact = jnp.isfinite(fixed) & (lax.pow(jnp.full_like(x, base), whole) == x)
        return result + jnp.where(exact, whole - fixed, jnp.zeros_like(fixed))

    return log


def _along_cuts(fn: Callable[[Any], Any], side: int = 1) -> Callable[[Any], Any]:
    """For complex numbers: the imaginary part has `side` times the argument's sign, on branch cuts that of its zero too. JAX has one side of a cut alone."""

    def cut(x: Array) -> Array:
        found = fn(x)
        return lax.complex(found.real, jnp.copysign(found.imag, side * x.imag)) if is_complex(x) else found

    return cut


for _op, _fn in (
    (aten.exp.default, jnp.exp),
    (aten.exp2.default, _exp2),
    (aten.expm1.default, jnp.expm1),
    (aten.log.default, jnp.log),
    (aten.log2.default, _log_base(2)),
    (aten.log10.default, _log_base(10)),
    (aten.log1p.default, jnp.log1p),
    (aten.sqrt.default, _along_cuts(jnp.sqrt)),
    (aten.rsqrt.default, _rsqrt),
    (aten.reciprocal.default, lambda x: 1 / x),
    (aten.sigmoid.default, lax.logistic),
    (aten.sin.default, jnp.sin),
    (aten.cos.default, jnp.cos),
    (aten.tan.default, jnp.tan),
    (aten.asin.default, _along_cuts(jnp.arcsin)),
    (aten.acos.default, _along_cuts(jnp.arccos, -1)),
    (aten.atan.default, jnp.arctan),
    (aten.sinh.default, jnp.sinh),
    (aten.cosh.default, jnp.cosh),
    (aten.tanh.default, jnp.tanh),
    (aten.asinh.default, jnp.arcsinh),
    (aten.acosh.default, _along_cuts(jnp.arccosh)),
    (aten.atanh.default, jnp.arctanh),
    (aten.erf.default, lax.erf),
    (aten.erfc.default, lax.erfc),
    (aten.erfinv.default, lax.erf_inv),
    (aten.lgamma.default, lax.lgamma),
    (aten.digamma.default, _digamma),
    (aten.i0.default, jax.scipy.special.i0),
    (aten.deg2rad.default, lambda x: x * (math.pi / 180)),
    (aten.rad2deg.default, lambda x: x * (180 / math.pi)),
):
    _register_float(_op, _fn)


@lowering(aten.neg.default)
def neg(self: Array) -> Array:
    return -self


@jax.custom_jvp
def _real_abs(x: Array) -> Array:
    return lax.abs(x)


@_real_abs.defjvp
def _real_abs_jvp(primals: tuple[Any], tangents: tuple[Any]) -> tuple[Array, Array]:
    return lax.abs(primals[0]), tangents[0] * lax.sign(primals[0])  # 0 at 0, where JAX has 1


@lowering(aten.abs.default)
def magnitude(self: Array) -> Array:
    """|x|, real for complex input."""
    return _real_abs(self) if jnp.issubdtype(self.dtype, jnp.floating) else jnp.abs(self)


def _round_even(x: Array) -> Array:
    return lax.round(x, lax.RoundingMethod.TO_NEAREST_EVEN)


def _register_rounding(op: torch._ops.OpOverload, fn: Callable[[Any], Any]) -> None:
    @lowering(op)
    def rounding(self: Array) -> Array:
        return fn(self) if is_float(self) else self


_register_rounding(aten.floor.default, jnp.floor)
_register_rounding(aten.ceil.default, jnp.ceil)
_register_rounding(aten.trunc.default, jnp.trunc)
_register_rounding(aten.round.default, _round_even)


@lowering(aten.round.decimals)
def round_decimals(self: Array, decimals: int) -> Array:
    if not is_float(self):
        return self
    x, scale = widen(self), jnp.asarray(10.0 ** abs(decimals), opmath(self.dtype))
    x = _round_even(x * scale) / scale if decimals > 0 else _round_even(x / scale) * scale
    return x.astype(self.dtype)


@lowering(aten.frac.default)
def frac(self: Array) -> Array:
    return self - jnp.trunc(self)


@lowering(aten.frexp.Tensor)
def frexp(self: Array) -> tuple[Array, Array]:
    mantissa, exponent = jnp.frexp(self)
    return mantissa, jnp.where(jnp.isfinite(self), exponent, 0).astype(jnp.int32)


@lowering(aten.angle.default)
def angle(self: Array) -> Array:
    """The argument of complex numbers; for real ones 0 or pi, and NaN for NaN."""
    if is_complex(self):
        return jnp.angle(self)

    def real(x: Array) -> Array:
        x = lax.stop_gradient(x)
        return jnp.where(x != x, x, jnp.where(x < 0, jnp.full_like(x, math.pi), jnp.zeros_like(x)))

    return elementwise(real, self, floating=True)
