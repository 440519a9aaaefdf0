"""Bessel functions J, Y, K and the Airy function, from Chebyshev expansions that SciPy's values define.

XLA has none of these. Each function is smooth factors times an expansion in a variable mapped to [-1, 1]; the expansion
is interpolated once per process from scipy.special (a dependency of JAX) in float64, to about 1e-15. Near the origin the
variable is z = x^2 with the logarithm split off; far out it is t = edge / x, and the oscillating functions use the
amplitudes P + iQ = H1_v(x) e^{-i(x - v pi/2 - pi/4)} sqrt(pi x / 2). torch defines no gradients here, and its float64 values
are good to about 1e-7 only: these follow SciPy where the two differ.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax.numpy as jnp
import numpy as np
import torch
from jax.scipy import special as jsp

from torch_bridge.lowerings.precision import elementwise
from torch_bridge.lowerings.registry import lowering
from torch_bridge.lowerings.types import Array

aten = torch.ops.aten

_NEAR = 8.0  # J and Y: power-like below, oscillating above
_NEAR_K = 2.0
_AIRY = (-5.0, 2.0)
_TERMS = 48
T = TypeVar("T", float, Array)


@functools.cache
def _expansion(name: str) -> tuple[float, ...]:
    """Chebyshev coefficients of one of the functions in `_targets`, without the tail that rounds to nothing."""
    low, high, fn = _targets()[name]
    series = np.polynomial.chebyshev.chebinterpolate(lambda u: fn(low + (u + 1) * (high - low) / 2), _TERMS)
    scale = np.abs(series).max() * 1e-16
    return tuple(float(c) for c in series[: np.nonzero(np.abs(series) > scale)[0][-1] + 1])


@functools.cache
def _targets() -> dict[str, tuple[float, float, Callable[[Any], Any]]]:
    """Name -> (interval, function) of everything that is expanded."""
    from scipy import special as sp

    def amplitude(order: float, edge: float, part: str) -> tuple[float, float, Callable[[np.ndarray], np.ndarray]]:
        def fn(t: np.ndarray) -> np.ndarray:
            x = edge / t
            return getattr(sp.hankel1e(order, x) * np.sqrt(np.pi * x / 2) * np.exp(1j * np.pi * (order / 2 + 0.25)), part)

        return 0.0, 1.0, fn

    z = _NEAR**2
    airy_edge = _zeta(-_AIRY[0])
    return {
        "j0": (0.0, z, lambda z: sp.j0(np.sqrt(z))),
        "j1": (0.0, z, lambda z: sp.j1(np.sqrt(z)) / np.sqrt(z)),
        "y0": (0.0, z, lambda z: sp.y0(np.sqrt(z)) - np.log(z) / np.pi * sp.j0(np.sqrt(z))),
        "y1": (0.0, z, lambda z: (sp.y1(np.sqrt(z)) - np.log(z) / np.pi * sp.j1(np.sqrt(z)) + 2 / np.pi / np.sqrt(z)) / np.sqrt(z)),
        "k0": (0.0, _NEAR_K**2, lambda z: sp.k0(np.sqrt(z)) + np.log(z / 4) / 2 * sp.i0(np.sqrt(z))),
        "k1": (0.0, _NEAR_K**2, lambda z: np.sqrt(z) * (sp.k1(np.sqrt(z)) - np.log(z / 4) / 2 * sp.i1(np.sqrt(z)))),
        "k0 far": (0.0, 1.0, lambda t: sp.k0e(_NEAR_K / t) * np.sqrt(_NEAR_K / t)),
        "k1 far": (0.0, 1.0, lambda t: sp.k1e(_NEAR_K / t) * np.sqrt(_NEAR_K / t)),
        **{f"{part} {order}": amplitude(order, _NEAR, part) for order in (0, 1) for part in ("real", "imag")},
        **{f"{part} airy": amplitude(1 / 3, airy_edge, part) for part in ("real", "imag")},
        "airy": (*_AIRY, lambda x: sp.airy(x)[0]),
        "airy far": (0.0, 1.0, lambda t: (lambda x: sp.airye(x)[0] * x**0.25)(_AIRY[1] * t ** (-2 / 3))),
    }


def _evaluate(name: str, v: Array) -> Array:
    """The expansion at `v`, clipped to its interval (the other branch of a `where` is discarded), by Clenshaw's recurrence."""
    low, high, _ = _targets()[name]
    u = (jnp.clip(v, low, high) - low) * (2 / (high - low)) - 1
    return _clenshaw(_expansion(name), u)


def _clenshaw(series: Sequence[float], u: Array) -> Array:
    a = b = jnp.zeros_like(u)
    for c in reversed(series[1:]):
        a, b = 2 * u * a - b + c, a
    return u * a - b + series[0]


def _zeta(x: T) -> T:
    return 2 / 3 * x**1.5


def _oscillating(order: int, x: Array) -> tuple[Array, Array]:
    """J and Y of order 0 or 1 far from the origin; cos(x - pi/4) is expanded so that large x loses no digits."""
    p, q = _evaluate(f"real {order}", _NEAR / x), _evaluate(f"imag {order}", _NEAR / x)
    c, s = (jnp.cos(x) + jnp.sin(x)) * math.sqrt(0.5), (jnp.sin(x) - jnp.cos(x)) * math.sqrt(0.5)
    if order == 1:  # another quarter turn
        c, s = s, -c
    size = jnp.sqrt(2 / (math.pi * x))
    return size * (p * c - q * s), size * (p * s + q * c)


def _bessel_j(order: int, x: Array) -> Array:
    r = jnp.abs(x)
    near = _evaluate(f"j{order}", r * r) * (r if order else 1)
    out = jnp.where(r <= _NEAR, near, _oscillating(order, jnp.maximum(r, _NEAR))[0])
    return jnp.copysign(1, x) * out if order else out


def _bessel_y(order: int, x: Array) -> Array:
    r = jnp.where(x > 0, x, 1)
    log = 2 / math.pi * jnp.log(r)
    if order:
        near = log * _bessel_j(1, r) - 2 / (math.pi * r) + r * _evaluate("y1", r * r)
    else:
        near = log * _bessel_j(0, r) + _evaluate("y0", r * r)
    out = jnp.where(x <= _NEAR, near, _oscillating(order, jnp.maximum(r, _NEAR))[1])
    return jnp.where(x > 0, out, jnp.where(x == 0, -jnp.inf, jnp.nan))


def _bessel_k(order: int, scaled: bool, x: Array) -> Array:
    r = jnp.where(x > 0, x, 1)
    if order:
        near = jnp.log(r / 2) * jsp.i1(r) + _evaluate("k1", r * r) / r
    else:
        near = -jnp.log(r / 2) * jsp.i0(r) + _evaluate("k0", r * r)
    far = _evaluate(f"k{order} far", _NEAR_K / r) / jnp.sqrt(r)
    out = jnp.where(x <= _NEAR_K, near * jnp.exp(r) if scaled else near, far if scaled else far * jnp.exp(-r))
    return jnp.where(x > 0, out, jnp.where(x == 0, jnp.inf, jnp.nan))


def _airy_ai(x: Array) -> Array:
    right, left = jnp.maximum(x, _AIRY[1]), jnp.maximum(-x, -_AIRY[0])
    decaying = _evaluate("airy far", _zeta(_AIRY[1]) / _zeta(right)) * jnp.exp(-_zeta(right)) / right**0.25
    phase, edge = _zeta(left), _zeta(-_AIRY[0])
    p, q = _evaluate("real airy", edge / phase), _evaluate("imag airy", edge / phase)
    c, s = jnp.cos(phase - math.pi / 4), jnp.sin(phase - math.pi / 4)
    oscillating = (p * c - q * s) / (math.sqrt(math.pi) * left**0.25)
    out = jnp.where(x > _AIRY[1], decaying, jnp.where(x < _AIRY[0], oscillating, _evaluate("airy", x)))
    return jnp.where(jnp.isfinite(x), out, jnp.nan)  # at +inf too, as torch


def _spherical_j0(x: Array) -> Array:
    safe = jnp.where((x == 0) | jnp.isinf(x), 1, x)
    return jnp.where(x == 0, 1, jnp.where(jnp.isinf(x), 0, jnp.sin(safe) / safe))


_TABLE: dict[torch._ops.OpOverload, Callable[[Any], Any]] = {
    aten.special_airy_ai.default: _airy_ai,
    aten.special_bessel_j0.default: functools.partial(_bessel_j, 0),
    aten.special_bessel_j1.default: functools.partial(_bessel_j, 1),
    aten.special_bessel_y0.default: functools.partial(_bessel_y, 0),
    aten.special_bessel_y1.default: functools.partial(_bessel_y, 1),
    aten.special_modified_bessel_i0.default: jsp.i0,
    aten.special_modified_bessel_i1.default: jsp.i1,
    aten.special_modified_bessel_k0.default: functools.partial(_bessel_k, 0, False),
    aten.special_modified_bessel_k1.default: functools.partial(_bessel_k, 1, False),
    aten.special_scaled_modified_bessel_k0.default: functools.partial(_bessel_k, 0, True),
    aten.special_scaled_modified_bessel_k1.default: functools.partial(_bessel_k, 1, True),
    aten.special_spherical_bessel_j0.default: _spherical_j0,
}


def _register(op: torch._ops.OpOverload, fn: Callable[[Any], Any]) -> None:
    @lowering(op)
    def run(x: Array) -> Array:
        return elementwise(fn, x, floating=True)


for _op, _fn in _TABLE.items():
    _register(_op, _fn)
