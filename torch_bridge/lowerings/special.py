"""torch.special functions of one and two arguments, igamma, polygamma and sinc.

JAX has most of them; this file adds torch's values at the edges (poles, zeros, infinities), its derivatives, and its
formulas where JAX's lose digits (`log_ndtr`) or are wrong (`zeta` for negative q). Bessel and Airy functions are in
`special_bessel`, orthogonal polynomials in `special_polynomials`.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import torch
from jax import lax
from jax.scipy import special as jsp

from torch_bridge.lowerings.precision import elementwise
from torch_bridge.lowerings.registry import lowering
from torch_bridge.lowerings.types import Array, Operand

aten = torch.ops.aten


@jax.custom_jvp
def _log_ndtr(x: Array) -> Array:
    """log of the normal cdf: erfcx carries the left tail, log1p the right one."""
    left = x < -1
    tail = jnp.log(jsp.erfcx(-x * math.sqrt(0.5)) / 2) - x * x / 2
    return jnp.where(left, tail, jnp.log1p(-lax.erfc(x * math.sqrt(0.5)) / 2))


_log_ndtr.defjvps(lambda dx, _, x: dx * math.sqrt(2 / math.pi) / jsp.erfcx(-x * math.sqrt(0.5)))


@jax.custom_jvp
def _entr(x: Array) -> Array:
    return jsp.entr(x)


_entr.defjvps(lambda dx, _, x: dx * (-jnp.log(x) - 1))  # infinite at 0 as torch's, not JAX's 0


def _xlog1py(x: Array, y: Array) -> Array:
    """x * log1p(y), 0 at x = 0 whatever y is, except NaN."""
    skip = (x == 0) & ~jnp.isnan(y)
    return jnp.where(skip, 0, jnp.where(skip, 1, x) * jnp.log1p(jnp.where(skip, 0, y)))


# Gamma family


def _igamma(a: Array, x: Array) -> Array:
    return _at_gamma_edges(a, x, jsp.gammainc(a, x), at_origin=0, beyond=1)


def _igammac(a: Array, x: Array) -> Array:
    return _at_gamma_edges(a, x, jsp.gammaincc(a, x), at_origin=1, beyond=0)


def _at_gamma_edges(a: Array, x: Array, inside: Array, at_origin: int, beyond: int) -> Array:
    """Limits of the incomplete gamma functions: `at_origin` for x << a, `beyond` for x >> a."""
    out = jnp.where(jnp.isinf(x), beyond, inside)
    out = jnp.where(jnp.isinf(a), jnp.where(jnp.isinf(x), jnp.nan, at_origin), out)
    out = jnp.where(x == 0, at_origin, out)
    out = jnp.where(a == 0, jnp.where(x > 0, beyond, jnp.nan), out)
    return jnp.where((x < 0) | (a < 0), jnp.nan, out).astype(inside.dtype)


@jax.custom_jvp
def _zeta(x: Array, q: Array) -> Array:
    """Hurwitz zeta. For negative q the terms up to q + m > 0 are added one by one, as many as the most negative q needs."""
    shift = jnp.where((q < 0) & jnp.isfinite(q) & (x > 1), jnp.ceil(-q), 0)

    def add(state: tuple[Array, Array]) -> tuple[Array, Array]:
        k, total = state
        return k + 1, total + jnp.where(k < shift, jnp.power(q + k, -x), 0)

    start = (jnp.zeros((), q.dtype), jnp.zeros(jnp.broadcast_shapes(x.shape, q.shape), q.dtype))
    head = lax.while_loop(lambda s: s[0] < jnp.max(shift, initial=0), add, start)[1]
    out = head + lax.zeta(*jnp.broadcast_arrays(x, jnp.where(q < 0, q + shift, q)))
    pole = (q <= 0) & (q == jnp.floor(q))
    out = jnp.where(pole, jnp.inf, jnp.where((q <= 0) & (x != jnp.floor(x)), jnp.nan, out))
    return jnp.where(x == 1, jnp.inf, jnp.where(x < 1, jnp.nan, out)).astype(q.dtype)


def _zeta_jvp(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    (x, q), (dx, dq) = primals, tangents
    if not isinstance(dx, jax.custom_derivatives.SymbolicZero):
        raise NotImplementedError("aten.special_zeta has no derivative by its first argument, in torch or here: detach it.")
    return _zeta(x, q), jnp.zeros_like(q) if isinstance(dq, jax.custom_derivatives.SymbolicZero) else -x * _zeta(x + 1, q) * dq


_zeta.defjvp(_zeta_jvp, symbolic_zeros=True)


def _trigamma(x: Array) -> Array:
    """Reflection below 1/2, then six steps up and the asymptotic series (Bernoulli numbers 1/6, -1/30, 1/42)."""
    low = x < 0.5
    z = jnp.where(low, 1 - x, x)
    total = sum(1 / (z + k) ** 2 for k in range(6))
    z = z + 6
    w = 1 / (z * z)
    total = total + (1 + 1 / (2 * z) + w * (1 / 6 - w * (1 / 30 - w / 42))) / z
    return jnp.where(low, (math.pi / jnp.sin(math.pi * x)) ** 2 - total, total)


def _polygamma(n: int, x: Array) -> Array:
    @jax.custom_jvp
    def value(x: Array) -> Array:
        if n == 0:
            return jnp.where(x == 0, jnp.copysign(jnp.full_like(x, jnp.inf), -x), lax.digamma(x))
        if n == 1:
            return _trigamma(x)
        return (-1) ** (n + 1) * math.exp(math.lgamma(n + 1)) * _zeta(jnp.asarray(n + 1, x.dtype), x)

    value.defjvps(lambda dx, _, x: dx * _polygamma(n + 1, x))
    return value(x)


@lowering(aten.polygamma.default)
def _polygamma_op(n: int, self: Array) -> Array:
    return elementwise(lambda x: _polygamma(n, x), self, floating=True)


@lowering(aten.mvlgamma.default)
def _mvlgamma(self: Array, p: int) -> Array:
    constant = p * (p - 1) / 4 * math.log(math.pi)
    return elementwise(lambda x: sum(lax.lgamma(x - j / 2) for j in range(p)) + constant, self, floating=True)


# Registration: all of these compute in torch's opmath type and round once.

_UNARY: dict[torch._ops.OpOverload, Callable[..., Array]] = {
    aten.special_entr.default: _entr,
    aten.special_erfcx.default: jsp.erfcx,
    aten.special_i0e.default: jsp.i0e,
    aten.special_i1.default: jsp.i1,
    aten.special_i1e.default: jsp.i1e,
    aten.special_log_ndtr.default: _log_ndtr,
    aten.special_ndtri.default: jsp.ndtri,
    aten.sinc.default: jnp.sinc,
}
_BINARY: dict[torch._ops.OpOverload, Callable[..., Array]] = {
    aten.igamma.default: _igamma,
    aten.igammac.default: _igammac,
    aten.special_xlog1py.default: _xlog1py,
    aten.special_xlog1py.other_scalar: _xlog1py,
    aten.special_xlog1py.self_scalar: _xlog1py,
    aten.special_zeta.default: _zeta,
    aten.special_zeta.other_scalar: _zeta,
    aten.special_zeta.self_scalar: _zeta,
}


def _register_unary(op: torch._ops.OpOverload, fn: Callable[..., Array]) -> None:
    @lowering(op)
    def run(self: Array) -> Array:
        return elementwise(fn, self, floating=True)


def _register_binary(op: torch._ops.OpOverload, fn: Callable[..., Array]) -> None:
    @lowering(op)
    def run(self: Operand, other: Operand) -> Array:
        return elementwise(fn, self, other, floating=True)


for _op, _fn in _UNARY.items():
    _register_unary(_op, _fn)
for _op, _fn in _BINARY.items():
    _register_binary(_op, _fn)
