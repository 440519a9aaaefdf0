"""Orthogonal polynomials of torch.special: twelve families, one recurrence.

The order n is a tensor of values, so the three-term recurrence runs up to the greatest order under a mask. Like torch, the
Chebyshev families switch to their trigonometric form inside (-1, 1) from a certain order on, orders are truncated to
integers, negative ones give 0, and the recurrence of an element stops at NaN. torch defines no gradients here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import torch
from jax import lax

from torch_bridge.lowerings.precision import elementwise
from torch_bridge.lowerings.registry import lowering
from torch_bridge.lowerings.types import Array, Operand

aten = torch.ops.aten

Recurrence = Callable[[Any, Any, Any, Any], Any]  # (x, k, P_k, P_{k-1}) -> P_{k+1}


@dataclass(frozen=True)
class Family:
    """P_1, the recurrence, values at x = +-1 (None: none are special) and the trigonometric form above order `above`."""

    first: Callable[[Any], Any]
    step: Recurrence
    ends: Callable[[Any, Any], tuple[Any, Any]] | None = None
    trig: Callable[[Any, Any], Any] | None = None
    above: int = 8
    limit: bool = False  # Hermite: NaN above an order that depends on the dtype


def _order(n: Array) -> Array:
    return jnp.where(jnp.isfinite(n), n, -1).astype(jnp.int64)


def _recur(family: Family, x: Array, n: Array) -> Array:
    x, n = jnp.broadcast_arrays(x, n)
    top = jnp.max(n, initial=0)

    def step(state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        k, before, now = state
        after = family.step(x, k.astype(x.dtype), now, before)
        go = (k < n) & ~jnp.isnan(now)
        return k + 1, jnp.where(go, now, before), jnp.where(go, after, now)

    state = (jnp.int64(1), jnp.ones_like(x), family.first(x))
    value = lax.while_loop(lambda s: s[0] < top, step, state)[2]
    return jnp.where(n == 0, 1, value)


def _polynomial(family: Family, x: Array, n: Array) -> Array:
    n = _order(n)
    usable = n
    if family.limit:
        usable = jnp.minimum(n, 512 if x.dtype == jnp.float64 else 128)
    if family.trig is not None:
        # The recurrence is not used where the trigonometric form is, and no element may make it run for long in vain.
        inside = (n > family.above) & (jnp.abs(x) < 1)
        usable = jnp.where(inside | (jnp.abs(x) == 1), 0, n)
    out = _recur(family, x, usable)
    if family.trig is not None:
        angle = jnp.arccos(jnp.clip(x, -1, 1))
        out = jnp.where(inside, family.trig(n.astype(x.dtype), angle), out)
    if family.ends is not None:
        parity = jnp.where(n % 2 == 0, 1, -1).astype(x.dtype)
        right, left = family.ends(n.astype(x.dtype), parity)
        out = jnp.where(x == 1, right, jnp.where(x == -1, left, out))
    if family.limit:
        out = jnp.where(n != usable, jnp.nan, out)
    return jnp.where(n < 0, 0, out).astype(x.dtype)


def _chebyshev_step(x: Array, k: Array, now: Array, before: Array) -> Array:
    return 2 * x * now - before


def _ratio(top: Array, bottom: Array, limit: Array) -> Array:
    """top / bottom, or `limit` where the denominator rounds to 0."""
    zero = bottom == 0
    return jnp.where(zero, limit, top / jnp.where(zero, 1, bottom))


_T = Family(lambda x: x, _chebyshev_step, lambda n, s: (jnp.ones_like(n), s), lambda n, a: jnp.cos(n * a), above=6)
_U = Family(
    lambda x: 2 * x,
    _chebyshev_step,
    lambda n, s: (n + 1, s * (n + 1)),
    lambda n, a: _ratio(jnp.sin((n + 1) * a), jnp.sin(a), n + 1),
)
_V = Family(
    lambda x: 2 * x - 1,
    _chebyshev_step,
    lambda n, s: (jnp.ones_like(n), s * (2 * n + 1)),
    lambda n, a: jnp.cos((n + 0.5) * a) / jnp.cos(a / 2),
)
_W = Family(
    lambda x: 2 * x + 1,
    _chebyshev_step,
    lambda n, s: (2 * n + 1, s),
    lambda n, a: _ratio(jnp.sin((n + 0.5) * a), jnp.sin(a / 2), 2 * n + 1),
)
_H = Family(lambda x: 2 * x, lambda x, k, now, before: 2 * x * now - 2 * k * before, limit=True)
_HE = Family(lambda x: x, lambda x, k, now, before: x * now - k * before, limit=True)
_L = Family(lambda x: 1 - x, lambda x, k, now, before: ((2 * k + (1 - x)) * now - k * before) / (k + 1))
_P = Family(lambda x: x, lambda x, k, now, before: ((2 * k + 1) * x * now - k * before) / (k + 1), lambda n, s: (jnp.ones_like(n), s))

_FAMILIES = {
    "chebyshev_polynomial_t": _T,
    "chebyshev_polynomial_u": _U,
    "chebyshev_polynomial_v": _V,
    "chebyshev_polynomial_w": _W,
    "hermite_polynomial_h": _H,
    "hermite_polynomial_he": _HE,
    "laguerre_polynomial_l": _L,
    "legendre_polynomial_p": _P,
}


def _register(name: str, family: Family, shifted: bool = False) -> None:
    packet = getattr(aten, name)

    @lowering(packet.default, packet.x_scalar, packet.n_scalar)
    def run(x: Operand, n: Operand) -> Array:
        return elementwise(lambda x, n: _polynomial(family, 2 * x - 1 if shifted else x, n), x, n, floating=True)


for _name, _family in _FAMILIES.items():
    _register(f"special_{_name}", _family)
    if _name.startswith("chebyshev"):
        _register(f"special_shifted_{_name}", _family, shifted=True)
