"""Adafactor's step, for tensors of which a rank may hold only a part: row and column means, norms and root mean squares are those of whole tensors.

Partial sums of all tensors that are shared out alike travel in one collective; there are three in a row (two for vectors).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from torch_bridge.collectives import collective_ops
from torch_bridge.ir import dtypes
from torch_bridge.lowerings.arithmetic import add, div, lerp, mul
from torch_bridge.lowerings.precision import widen
from torch_bridge.lowerings.types import Operand
from torch_bridge.optimizers.param_partition import Cut, Divided, parse

Arrays = list[Any]


def adafactor(params: Arrays, grads: Arrays, states: Sequence[Arrays], numbers: Sequence[Any], options: str) -> list[Arrays]:
    """The new parameters, each with its new state: row and column factors, or for vectors (and numbers) the variance.

    numbers: 1 - lr * decay, 1 - beta2, step size before it is scaled by the parameter, eps1, eps2, d. options: flags (decay, maximize), then for each
    parameter what it is a part of (`param_partition.text`).
    """
    flags, wholes = parse(options)
    keep, near, rate, eps1, eps2, d = numbers
    grads = [-g for g in grads] if "maximize" in flags else grads
    norms = _norms(params, wholes)
    states = [[lerp(old, mean, near) for old, mean in zip(s, m, strict=True)] for s, m in zip(states, _means(grads, wholes), strict=True)]
    estimates = _variances(states, wholes, eps1)
    updates = [mul(_rsqrt(_clamp(v, _double(eps1) ** 2)), g) for v, g in zip(estimates, grads, strict=True)]
    new: list[Arrays] = []
    for p, w, norm, update, size, state in zip(params, wholes, norms, updates, _norms(updates, wholes), states, strict=True):
        root = math.sqrt(w.numel)
        alpha = jnp.maximum(_double(eps2), norm / root) * _double(rate)
        step = -alpha / jnp.maximum(1.0, size / (root * _double(d)))
        new.append([add(mul(p, keep) if "decay" in flags else p, update, alpha=dtypes.Scalar(float, step)), *state])
    return new


def _means(grads: Arrays, wholes: Sequence[Divided]) -> list[Arrays]:
    """Of every gradient's squares: along rows and along columns, or for vectors the squares themselves."""
    wanted = [(g, w, dim) for g, w in zip(grads, wholes, strict=True) if g.ndim > 1 for dim in (-1, -2)]
    sums = iter(_together([_Sum((widen(g) ** 2).sum(dim, keepdims=True), w.across(dim)) for g, w, dim in wanted]))

    def mean(g: jax.Array, w: Divided, dim: int) -> Any:
        root = jnp.sqrt(next(sums)).astype(g.dtype)  # torch's way: the norm, squared
        return div(mul(root, root), w.shape[dim])

    return [[mean(g, w, -1), mean(g, w, -2)] if g.ndim > 1 else [mul(g, g)] for g, w in zip(grads, wholes, strict=True)]


def _variances(states: Sequence[Arrays], wholes: Sequence[Divided], eps1: Any) -> Arrays:
    """The estimates that the state stands for."""
    factors = [(s, w) for s, w in zip(states, wholes, strict=True) if len(s) == 2]
    sums = iter(_together([_Sum(widen(row).sum(-2, keepdims=True), w.across(-2)) for (row, _), w in factors]))

    def estimate(row: jax.Array, column: jax.Array, w: Divided) -> Any:
        mean = (next(sums) / w.shape[-2]).astype(row.dtype)
        return div(mul(row, column), _clamp(mean, _double(eps1)))

    return [estimate(s[0], s[1], w) if len(s) == 2 else s[0] for s, w in zip(states, wholes, strict=True)]


def _norms(tensors: Arrays, wholes: Sequence[Divided]) -> Arrays:
    """Of whole tensors, rounded to their dtypes, as 0-d float64 arrays."""
    sums = _together([_Sum((widen(t) ** 2).sum(), w.across()) for t, w in zip(tensors, wholes, strict=True)])
    return [_double(jnp.sqrt(s).astype(t.dtype)) for s, t in zip(sums, tensors, strict=True)]


# -- sums over ranks --------------------------------------------------------------------------------


class _Sum(NamedTuple):
    """What a rank has of a sum, and how the rest is shared out."""

    part: Any
    cuts: tuple[Cut, ...]


def _together(sums: Sequence[_Sum]) -> Arrays:
    """The sums over ranks; those over the same ranks in one collective."""
    found: Arrays = [s.part for s in sums]
    alike: dict[Any, list[int]] = {}
    for k, s in enumerate(sums):
        if s.cuts:
            alike.setdefault((tuple(c.groups for c in s.cuts), s.part.dtype), []).append(k)
    for (groups, _), places in alike.items():
        shares = [math.prod(c.share for c in sums[k].cuts) for k in places]
        joined = jnp.concatenate([jnp.ravel(sums[k].part * share) for k, share in zip(places, shares, strict=True)])
        for text in groups:
            joined = collective_ops.reduce(joined, "sum", collective_ops.lines(text))
        start = 0
        for k in places:
            part = sums[k].part
            found[k] = lax.slice_in_dim(joined, start, start + part.size).reshape(part.shape)
            start += part.size
    return found


# -- numbers ----------------------------------------------------------------------------------------


def _double(x: Operand) -> Any:
    """A number or one-element array as a 0-d float64 array."""
    return jnp.reshape(dtypes.cast(x, jnp.float64), ())


def _clamp(x: Any, low: Any) -> Any:
    return jnp.maximum(x, low.astype(x.dtype))


def _rsqrt(x: jax.Array) -> Any:
    return lax.rsqrt(widen(x)).astype(x.dtype)
