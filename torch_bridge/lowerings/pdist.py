"""Distances between all pairs of rows (`torch.pdist`), with torch's derivative where two rows coincide: 0."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from torch_bridge.lowerings.registry import lowering
from torch_bridge.lowerings.types import Array

aten = torch.ops.aten


def _distances(x: Array, p: float) -> Array:
    first, second = np.triu_indices(x.shape[0], 1)
    diff = jnp.abs(x[first] - x[second])
    if p == 0:
        return jnp.sum(diff != 0, -1).astype(x.dtype)
    if p == 1:
        return jnp.sum(diff, -1)
    if p == 2:
        return jnp.sqrt(jnp.sum(diff * diff, -1))
    if math.isinf(p):
        return jnp.max(diff, -1, initial=0)
    return jnp.sum(diff**p, -1) ** (1 / p)


def _slope(diff: Array, distance: Array, p: float) -> Array:
    """d distance / d diff per coordinate; 0 where the rows coincide."""
    some = jnp.where(distance == 0, 1, distance)
    size = jnp.abs(diff)
    if p == 1:
        return jnp.sign(diff)
    if p == 2:
        slope = diff / some
    elif math.isinf(p):
        slope = jnp.sign(diff) * (size == distance)
    else:
        slope = jnp.sign(diff) * jnp.where(diff == 0, 0, jnp.where(diff == 0, 1, size) ** (p - 1)) / some ** (p - 1)
    return jnp.where(distance == 0, 0, slope)


def _backward(grad: Array, x: Array, p: float, distances: Array) -> Array:
    """Sums over all ordered pairs of rows at once instead of scattering the pairs: (n, n, m) of work, no atomics."""
    n = x.shape[0]
    if p == 0 or x.size == 0 or n < 2:
        return jnp.zeros_like(x)
    first, second = np.triu_indices(n, 1)
    place = np.zeros((n, n), np.int32)
    place[first, second] = place[second, first] = np.arange(len(first))
    off_diagonal = ~np.eye(n, dtype=bool)[..., None]
    slope = _slope(x[:, None] - x[None], distances[place][..., None], p)
    return jnp.sum(jnp.where(off_diagonal, slope * grad[place][..., None], 0), axis=1).astype(x.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _pdist(x: Array, p: float) -> Array:
    return _distances(x, p)


_pdist.defvjp(
    lambda x, p: (lambda d: (d, (x, d)))(_distances(x, p)),
    lambda p, saved, grad: (_backward(grad, saved[0], p, saved[1]),),
)


@lowering(aten._pdist_forward.default)
def _pdist_forward(self: Array, p: float = 2.0) -> Array:
    return _pdist(self, p)


@lowering(aten._pdist_backward.default)
def _pdist_backward(grad: Array, self: Array, p: float, pdist: Array) -> Array:
    return _backward(grad, self, p, lax.stop_gradient(pdist))
