"""Random ops: torch's distributions (not torch's bit streams) from a JAX key.

Every lowering takes the keyword `key`. Samplers draw raw bits and shape them here, because torch's grids are part of
its documented behaviour: a uniform float has as many random bits as its mantissa, never reaches its upper bound and is
rounded down in half precision; `random_` covers a range that depends on the dtype. Half-precision continuous samples are
made in float32 and rounded once. Values carry no gradient (torch's do not either), except where torch defines one
(`_standard_gamma`, `rrelu_with_noise`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from torch_bridge.ir import dtypes
from torch_bridge.lowerings.registry import lowering
from torch_bridge.lowerings.types import Array, Key, Scalar

aten = torch.ops.aten

_DIGITS = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}
Shape = Sequence[int]


def _wide(dtype: torch.dtype) -> Any:
    """The JAX dtype samples are computed in: float64 for itself, float32 for everything else."""
    return jnp.float64 if dtype in (torch.float64, torch.complex128) else jnp.float32


def _default(dtype: torch.dtype | None) -> torch.dtype:
    return torch.get_default_dtype() if dtype is None else dtype


def _unit(key: Key, shape: Shape, dtype: torch.dtype) -> Array:
    """Uniform on the multiples of 2^-digits in [0, 1), in the wide dtype; exact in `dtype`."""
    digits = _DIGITS.get(dtype, 24)
    width = 64 if digits > 24 else 32
    bits = jax.random.bits(key, tuple(shape), jnp.uint64 if width == 64 else jnp.uint32)
    return (bits >> (width - digits)).astype(_wide(dtype)) * 2.0**-digits


def _open_unit(key: Key, shape: Shape, dtype: torch.dtype) -> Array:
    """Uniform strictly inside (0, 1), in the wide dtype: safe under log."""
    digits, width = (52, 64) if dtype == torch.float64 else (23, 32)
    bits = jax.random.bits(key, tuple(shape), jnp.uint64 if width == 64 else jnp.uint32)
    return ((bits >> (width - digits)).astype(_wide(dtype)) + 0.5) * 2.0**-digits


def _gaussian(key: Key, shape: Shape, dtype: torch.dtype) -> Array:
    """Standard normal in the wide dtype; a complex one has variance 1 in total."""
    if not dtype.is_complex:
        return jax.random.normal(key, tuple(shape), _wide(dtype))
    parts = jax.random.normal(key, (2, *shape), _wide(dtype)) * math.sqrt(0.5)
    return lax.complex(parts[0], parts[1])


def _rounded(x: Array, dtype: torch.dtype) -> Array:
    return x.astype(dtypes.to_jax(dtype))


def _valid(x: Array, holds: Array) -> Array:
    """NaN where a parameter's value is none that torch accepts: to raise, as on the CPU, would stop the graph."""
    return jnp.where(holds, x, jnp.asarray(jnp.nan, x.dtype))


# Uniform


def _uniform(key: Key, shape: Shape, dtype: torch.dtype, low: float | dtypes.Scalar, high: float | dtypes.Scalar) -> Array:
    if dtype.is_complex:
        real = torch.float64 if dtype == torch.complex128 else torch.float32
        parts = _uniform(key, (2, *shape), real, low, high)
        return lax.complex(parts[0], parts[1])
    unit = _unit(key, shape, dtype)
    if isinstance(low, dtypes.Scalar) or isinstance(high, dtypes.Scalar):
        return _uniform_between(unit, dtype, dtypes.cast(low, jnp.float64), dtypes.cast(high, jnp.float64))
    if (low, high) == (0.0, 1.0):
        return _rounded(unit, dtype)
    x = _rounded(unit * (high - low) + low, dtype)
    # Rounding may reach the excluded upper bound: take the value just below it.
    top = np.asarray(high).astype(x.dtype)
    below = jnp.nextafter(jnp.asarray(top), jnp.asarray(low, x.dtype)) if float(top) >= high else top
    return x if low == high else jnp.minimum(x, below)


def _uniform_between(unit: Array, dtype: torch.dtype, low: Array, high: Array) -> Array:
    """The same for bounds that are inputs of the program, the first below the second."""
    x = _rounded(unit * (high - low).astype(unit.dtype) + low.astype(unit.dtype), dtype)
    top = high.astype(x.dtype)
    return jnp.minimum(x, jnp.where(top.astype(jnp.float64) >= high, jnp.nextafter(top, low.astype(x.dtype)), top))


@lowering(aten.rand.default, aten.rand.generator, rng=True)
def _rand(size: Shape, *, dtype: torch.dtype | None = None, key: Key) -> Array:
    return _uniform(key, size, _default(dtype), 0.0, 1.0)


@lowering(aten.rand_like.default, aten.rand_like.generator, rng=True)
def _rand_like(self: Array, *, dtype: torch.dtype | None = None, key: Key) -> Array:
    return _uniform(key, self.shape, dtype or dtypes.to_torch(self.dtype), 0.0, 1.0)


@lowering(aten.uniform.default, rng=True)
def _uniform_functional(
    self: Array, low: float | dtypes.Scalar = 0.0, high: float | dtypes.Scalar = 1.0, *, key: Key, **named: float
) -> Array:
    # `from` is a Python keyword, so callers that pass the schema's names arrive in `named`.
    low, high = named.get("from", low), named.get("to", high)
    return _uniform(key, self.shape, dtypes.to_torch(self.dtype), low, high)


# Normal and friends


@lowering(aten.randn.default, aten.randn.generator, rng=True)
def _randn(size: Shape, *, dtype: torch.dtype | None = None, key: Key) -> Array:
    return _rounded(_gaussian(key, size, _default(dtype)), _default(dtype))


@lowering(aten.randn_like.default, aten.randn_like.generator, rng=True)
def _randn_like(self: Array, *, dtype: torch.dtype | None = None, key: Key) -> Array:
    return _randn(self.shape, dtype=dtype or dtypes.to_torch(self.dtype), key=key)


@lowering(aten.normal.float_float, rng=True)
def _normal_float_float(
    mean: float | dtypes.Scalar, std: float | dtypes.Scalar, size: Shape, *, dtype: torch.dtype | None = None, key: Key
) -> Array:
    draws = _gaussian(key, size, _default(dtype))
    return _rounded(draws * dtypes.cast(std, draws.dtype) + dtypes.cast(mean, draws.dtype), _default(dtype))


@lowering(aten.normal_functional.default, rng=True)
def _normal_functional(self: Array, mean: float | dtypes.Scalar = 0.0, std: float | dtypes.Scalar = 1.0, *, key: Key) -> Array:
    return _normal_float_float(mean, std, self.shape, dtype=dtypes.to_torch(self.dtype), key=key)


@lowering(aten.normal.Tensor_float, aten.normal.float_Tensor, aten.normal.Tensor_Tensor, rng=True)
def _normal_tensors(mean: Array | float, std: Array | float = 1.0, *, key: Key) -> Array:
    """The result has the dtype of `mean` where that is a tensor, else that of `std`."""
    dtype = dtypes.to_torch((mean if hasattr(mean, "dtype") else std).dtype)
    shape = jnp.broadcast_shapes(jnp.shape(mean), jnp.shape(std))
    wide = jnp.complex128 if dtype == torch.complex128 else jnp.complex64 if dtype.is_complex else _wide(dtype)
    mean, std = (lax.stop_gradient(jnp.asarray(x).astype(wide)) for x in (mean, std))
    std = std if dtype.is_complex else _valid(std, std >= 0)
    return _rounded(_gaussian(key, shape, dtype) * std + mean, dtype)


@lowering(aten.log_normal.default, rng=True)
def _log_normal(self: Array, mean: float = 1.0, std: float = 2.0, *, key: Key) -> Array:
    dtype = dtypes.to_torch(self.dtype)
    return _rounded(jnp.exp(_gaussian(key, self.shape, dtype) * std + mean), dtype)


@lowering(aten.exponential.default, rng=True)
def _exponential(self: Array, lambd: float = 1.0, *, key: Key) -> Array:
    """Strictly positive, so that `gumbel_softmax` and exponential races can take its log or divide by it."""
    dtype = dtypes.to_torch(self.dtype)
    return _rounded(-jnp.log(_open_unit(key, self.shape, dtype)) / lambd, dtype)


@lowering(aten.geometric.default, rng=True)
def _geometric(self: Array, p: float, *, key: Key) -> Array:
    draws = jnp.ceil(jnp.log(_open_unit(key, self.shape, torch.float64)) / math.log1p(-p))
    return draws.astype(self.dtype)


@lowering(aten.cauchy.default, rng=True)
def _cauchy(self: Array, median: float = 0.0, sigma: float = 1.0, *, key: Key) -> Array:
    dtype = dtypes.to_torch(self.dtype)
    return _rounded(median + sigma * jnp.tan(math.pi * (_open_unit(key, self.shape, dtype) - 0.5)), dtype)


# Integers


def _integers(key: Key, shape: Shape, low: int | Array, span: int | Array) -> Array:
    """int64 uniform on [low, low + span); the span may be up to 2^64, or traced.

    As in torch the draw is random bits modulo the span: 32 of them while the bias stays below 2^-16, else 64.
    """
    if isinstance(span, int) and span <= 1 << 16:
        draw = (jax.random.bits(key, tuple(shape), jnp.uint32) % jnp.uint32(span)).astype(jnp.uint64)
    else:
        draw = jax.random.bits(key, tuple(shape), jnp.uint64)
        if not isinstance(span, int):
            draw = draw % jnp.asarray(span).astype(jnp.uint64)
        elif span < 1 << 64:
            draw = draw % jnp.uint64(span)
    base = jnp.uint64(low % (1 << 64)) if isinstance(low, int) else jnp.asarray(low).astype(jnp.uint64)
    return (draw + base).astype(jnp.int64)


def _representable(low: int, high: int, dtype: torch.dtype) -> tuple[int, int]:
    """Shrink [low, high) for a float dtype until no draw rounds to `high` or to below `low`, as torch does."""
    digits = _DIGITS.get(dtype)
    if digits is None:
        return low, high
    first, last = (int(np.asarray(v, np.int64).astype(dtypes.to_jax(dtype))) for v in (low + 1, high - 1))
    if first < low:
        low = first + (1 << (abs(low + 1).bit_length() - digits))
    if last >= high:
        high = last - (1 << (abs(high - 1).bit_length() - digits))
    return low, high


def _between(key: Key, shape: Shape, low: int, high: int, dtype: torch.dtype) -> Array:
    low, high = _representable(low, high, dtype)
    return _integers(key, shape, low, high - low).astype(dtypes.to_jax(dtype))


@lowering(aten.randint.default, aten.randint.generator, rng=True)
def _randint(high: int, size: Shape, *, dtype: torch.dtype | None = torch.int64, key: Key) -> Array:
    return _between(key, size, 0, high, dtype or torch.int64)


@lowering(aten.randint.low, aten.randint.low_generator, rng=True)
def _randint_low(low: int, high: int, size: Shape, *, dtype: torch.dtype | None = torch.int64, key: Key) -> Array:
    return _between(key, size, low, high, dtype or torch.int64)


@lowering(aten.randint_like.default, aten.randint_like.generator, rng=True)
def _randint_like(self: Array, high: int, *, dtype: torch.dtype | None = None, key: Key) -> Array:
    return _between(key, self.shape, 0, high, dtype or dtypes.to_torch(self.dtype))


@lowering(aten.randint_like.low_dtype, aten.randint_like.low_generator_dtype, rng=True)
def _randint_like_low(self: Array, low: int, high: int, *, dtype: torch.dtype | None = None, key: Key) -> Array:
    return _between(key, self.shape, low, high, dtype or dtypes.to_torch(self.dtype))


@lowering(aten.randint_like.Tensor, aten.randint_like.Tensor_generator, rng=True)
def _randint_like_tensor(self: Array, high: Array, *, dtype: torch.dtype | None = None, key: Key) -> Array:
    draws = _integers(key, self.shape, 0, lax.stop_gradient(high).reshape(()).astype(jnp.int64))
    return draws.astype(dtypes.to_jax(dtype) if dtype else self.dtype)


def _last(dtype: torch.dtype) -> int:
    """The greatest value of `random_()` without bounds: 2^digits for floats, the greatest integer otherwise."""
    if dtype == torch.bool:
        return 1
    return 1 << _DIGITS[dtype] if dtype in _DIGITS else torch.iinfo(dtype).max


@lowering(aten.random.default, rng=True)
def _random(self: Array, *, key: Key) -> Array:
    return _integers(key, self.shape, 0, _last(dtypes.to_torch(self.dtype)) + 1).astype(self.dtype)


@lowering(aten.random.to, rng=True)
def _random_to(self: Array, to: int, *, key: Key) -> Array:
    return _between(key, self.shape, 0, to, dtypes.to_torch(self.dtype))


@lowering(getattr(aten.random, "from"), rng=True)
def _random_from(self: Array, low: int | None = None, to: int | None = None, *, key: Key, **named: int) -> Array:
    low = named.get("from", low)
    dtype = dtypes.to_torch(self.dtype)
    assert low is not None
    if to is not None:
        return _between(key, self.shape, low, to, dtype)
    low, _ = _representable(low, low + 2, dtype)
    return _integers(key, self.shape, low, _last(dtype) + 1 - low).astype(self.dtype)


@lowering(aten.randperm.default, aten.randperm.generator, rng=True)
def _randperm(n: int, *, dtype: torch.dtype | None = torch.int64, key: Key) -> Array:
    order = jax.random.permutation(_threefry(key), jnp.arange(n, dtype=jnp.int32 if n < 1 << 31 else jnp.int64))
    return order.astype(dtypes.to_jax(dtype or torch.int64))


# Discrete distributions with parameters


def _flips(key: Key, shape: Shape, p: float | dtypes.Scalar) -> Array:
    """Booleans, true with probability p: one integer comparison per element, exact to 2^-32 (2^-64 for tiny p)."""
    if isinstance(p, dtypes.Scalar):  # which is not tiny, and not nearly 1
        return jax.random.bits(key, tuple(shape), jnp.uint32) < jnp.round(p.value * 2.0**32).astype(jnp.uint32)
    if p <= 0.0 or p >= 1.0:
        return jnp.full(tuple(shape), p >= 1.0)
    width, uint = (32, jnp.uint32) if p > 2.0**-16 else (64, jnp.uint64)
    threshold = round(p * 2.0**width)
    if threshold >= 1 << width:
        return jnp.full(tuple(shape), True)
    return jax.random.bits(key, tuple(shape), uint) < np.array(threshold, dtype=uint)


@lowering(aten.bernoulli.p, rng=True)
def _bernoulli_p(self: Array, p: float | dtypes.Scalar, *, key: Key) -> Array:
    return dtypes.cast(_flips(key, self.shape, p), self.dtype)


@lowering(aten.bernoulli.default, rng=True)
def _bernoulli(self: Array, *, key: Key) -> Array:
    return _bernoulli_tensor(self, self, key=key)


@lowering(aten.bernoulli.Tensor, rng=True)
def _bernoulli_tensor(self: Array, p: Array, *, key: Key) -> Array:
    wide = torch.float64 if p.dtype == jnp.float64 else torch.float32
    p = lax.stop_gradient(p)
    draws = dtypes.cast(_unit(key, self.shape, wide) < p, self.dtype)
    return _valid(draws, (p >= 0) & (p <= 1)) if jnp.issubdtype(self.dtype, jnp.floating) else draws


def _threefry(key: Key) -> Array:
    """A threefry key derived from any key, for samplers that split theirs among elements (poisson takes no other kind)."""
    return jax.random.wrap_key_data(jax.random.bits(key, (2,), jnp.uint32), impl="threefry2x32")


@lowering(aten.poisson.default, rng=True)
def _poisson(self: Array, *, key: Key) -> Array:
    rate = lax.stop_gradient(self).astype(jnp.promote_types(self.dtype, jnp.float32))
    return _valid(jax.random.poisson(_threefry(key), rate, self.shape, jnp.int64).astype(self.dtype), rate >= 0)


@lowering(aten.binomial.default, rng=True)
def _binomial(count: Array, prob: Array, *, key: Key) -> Array:
    shape = jnp.broadcast_shapes(count.shape, prob.shape)
    wide = jnp.float64 if count.dtype == jnp.float64 else jnp.float32
    n, p = (lax.stop_gradient(x).astype(wide) for x in (count, prob))
    return jax.random.binomial(_threefry(key), n, p, shape, wide).astype(count.dtype)


@lowering(aten.multinomial.default, rng=True)
def _multinomial(self: Array, num_samples: int, replacement: bool = False, *, key: Key) -> Array:
    """Indices of categories drawn with the weights of the last dim; a category of weight 0 is never drawn.

    Weights that torch refuses (negative, not finite, or all zero) give -1, an index out of range: to raise would stop the graph.
    """
    weights = lax.stop_gradient(self).astype(jnp.float64)
    valid = (jnp.isfinite(weights) & (weights >= 0)).all(-1, keepdims=True) & (weights > 0).any(-1, keepdims=True)
    if replacement:
        return jnp.where(valid, _draw_with_replacement(key, weights, num_samples), -1)
    # An exponential race: the k smallest arrival times are k draws without replacement, in order.
    race = weights / _exponential(weights, key=key)
    return jnp.where(valid, lax.top_k(race, num_samples)[1].astype(jnp.int64), -1)


def _draw_with_replacement(key: Key, weights: Array, num_samples: int) -> Array:
    """Search uniform draws in the cumulative weights, made monotone so that a zero weight spans an empty interval."""
    total = lax.cummax(jnp.where(weights > 0, jnp.cumsum(weights, -1), 0.0), axis=weights.ndim - 1)
    draws = _unit(key, (*weights.shape[:-1], num_samples), torch.float64) * total[..., -1:]
    draws = jnp.minimum(draws, jnp.nextafter(total[..., -1:], 0.0))
    search = lambda cdf, u: jnp.searchsorted(cdf, u, side="right")  # noqa: E731
    return (jax.vmap(search) if weights.ndim == 2 else search)(total, draws).astype(jnp.int64)


# Continuous distributions with parameters


@lowering(aten._standard_gamma.default, rng=True)
def _standard_gamma(self: Array, *, key: Key) -> Array:
    """Differentiable in alpha; a draw that underflows becomes the least normal number, as in torch."""
    return jnp.maximum(jax.random.gamma(_threefry(key), self, self.shape, self.dtype), jnp.finfo(self.dtype).tiny)


@lowering(aten._standard_gamma_grad.default)
def _standard_gamma_grad(self: Array, output: Array) -> Array:
    """d sample / d alpha at a fixed quantile."""
    return lax.random_gamma_grad(self, output)


@lowering(aten._sample_dirichlet.default, rng=True)
def _sample_dirichlet(self: Array, *, key: Key) -> Array:
    """Normalised gammas over the last dim, in log space: small concentrations underflow otherwise."""
    logs = jax.random.loggamma(_threefry(key), self, self.shape, self.dtype)
    info = jnp.finfo(self.dtype)
    return jnp.clip(jax.nn.softmax(logs, axis=-1), info.tiny, 1 - info.epsneg)


@lowering(aten._dirichlet_grad.default)
def _dirichlet_grad(x: Array, alpha: Array, total: Array) -> Array:
    """-(d cdf / d alpha) / pdf / (1 - x) of Beta(alpha, total - alpha) at x: one coordinate of a Dirichlet sample's gradient.

    JAX has no derivative of betainc by its parameters; a central difference in float64 is good to about 1e-9.
    """
    x64, a, t = (v.astype(jnp.float64) for v in (x, alpha, total))
    b, step = t - a, 1e-5 * a
    slope = (jax.scipy.special.betainc(a + step, b, x64) - jax.scipy.special.betainc(a - step, b, x64)) / (2 * step)
    log_pdf = (a - 1) * jnp.log(x64) + (b - 1) * jnp.log1p(-x64) - jax.scipy.special.betaln(a, b)
    return (-slope * jnp.exp(-log_pdf) / (1 - x64)).astype(x.dtype)


@lowering(aten.rrelu_with_noise_functional.default, rng=True)
def _rrelu(
    self: Array, noise: Array, lower: Scalar = 0.125, upper: Scalar = 1 / 3, training: bool = False, *, key: Key
) -> tuple[Array, Array]:
    """Leaky ReLU whose slope is drawn per element in training (the noise output) and is the mean slope otherwise."""
    wide = jnp.promote_types(self.dtype, jnp.float32)
    x, low, high = self.astype(wide), dtypes.cast(lower, wide), dtypes.cast(upper, wide)
    if not training:
        return jnp.where(x <= 0, x * ((low + high) / 2), x).astype(self.dtype), noise
    slope = _unit(key, self.shape, dtypes.to_torch(wide)) * (high - low) + low
    slope = jnp.where(x <= 0, slope, 1.0).astype(self.dtype)
    return (x * slope.astype(wide)).astype(self.dtype), slope
