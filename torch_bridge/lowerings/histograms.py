"""`histogramdd`: counts of points in a grid of bins, of given edges or evenly spread over the range of the data."""

from __future__ import annotations

import builtins
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import torch

from torch_bridge.ir import dtypes
from torch_bridge.lowerings.factories import linspace
from torch_bridge.lowerings.indexing import Points
from torch_bridge.lowerings.registry import lowering

aten = torch.ops.aten
Array = jax.Array


@lowering(aten._histogramdd_from_bin_tensors.default)
def histogramdd_from_edges(self: Array, bins: Sequence[Array], *, weight: Array | None = None, density: bool = False) -> Array:
    """Points [..., D] counted in bins that are closed below; the last one of each dim is closed above too."""
    points = self.reshape(-1, self.shape[-1])
    shape = tuple(edges.shape[0] - 1 for edges in bins)
    places = [_place(points[:, d], edges) for d, edges in enumerate(bins)]
    inside = jnp.all(jnp.stack([(at >= 0) & (at < n) for at, n in zip(places, shape, strict=True)]), axis=0)
    flat = jnp.zeros(points.shape[0], jnp.int64)
    for at, n in zip(places, shape, strict=True):
        flat = flat * n + at
    slots = math.prod(shape)
    each = jnp.ones(points.shape[0], self.dtype) if weight is None else weight.reshape(-1).astype(self.dtype)
    target = Points((slots,), {0: jnp.where(inside, flat, slots)}, wrap=False)  # one past the end is dropped
    counts = target.write(jnp.zeros(slots, self.dtype), each, "sum").reshape(shape)
    return _density(counts, bins) if density else counts


def _place(x: Array, edges: Array) -> Array:
    """Which bin each number lies in; -1 or the number of bins if in none."""
    last = edges.shape[0] - 1
    at = jnp.searchsorted(edges, x, side="right").astype(jnp.int64) - 1
    at = jnp.where(x == edges[-1], last - 1, at)
    return jnp.where(jnp.isnan(x), -1, at)


def _density(counts: Array, bins: Sequence[Array]) -> Array:
    share = counts / counts.sum()
    for d, edges in enumerate(bins):
        share = share / jnp.diff(edges).reshape([-1 if k == d else 1 for k in range(len(bins))])
    return share


@lowering(aten._histogramdd_from_bin_cts.default)
def histogramdd_from_counts(
    self: Array, bins: Sequence[int], *, range: Sequence[float] | None = None, weight: Array | None = None, density: bool = False
) -> Array:
    """Without a range the bins of a dim span its data; a span of nothing is widened by a half to each side, no data counts as [0, 1]."""
    points = self.reshape(-1, self.shape[-1])
    ends = [_ends(points[:, d], None if range is None else range[2 * d : 2 * d + 2]) for d in builtins.range(len(bins))]
    edges = [linspace(low, high, n + 1, dtype=dtypes.to_torch(self.dtype)) for (low, high), n in zip(ends, bins, strict=True)]
    return histogramdd_from_edges(self, edges, weight=weight, density=density)


def _ends(x: Array, given: Sequence[float] | None) -> tuple[Array, Array]:
    if given is not None:
        low, high = jnp.asarray(given[0], x.dtype), jnp.asarray(given[1], x.dtype)
    elif x.size:
        low, high = x.min(), x.max()
    else:
        low, high = jnp.zeros((), x.dtype), jnp.ones((), x.dtype)
    flat = low == high
    return jnp.where(flat, low - 0.5, low).astype(x.dtype), jnp.where(flat, high + 0.5, high).astype(x.dtype)
