"""Fractional max pooling (windows at pseudo-random places) and max unpooling.

Indices are torch's: positions in the flattened spatial dims of the input plane, int64.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax.numpy as jnp
import torch

from torch_bridge.lowerings.registry import lowering
from torch_bridge.lowerings.types import Array

aten = torch.ops.aten


def _starts(sample: Array, size: int, out: int, window: int) -> Array:
    """Where the `out` windows of one dim start, from samples of any shape: (..., out). The last one ends at the border."""
    last = jnp.full((*sample.shape, 1), size - window, jnp.int64)
    if out == 1:
        return last
    step = jnp.asarray(size - window, sample.dtype) / jnp.asarray(out - 1, sample.dtype)
    sample = sample[..., None]
    places = ((jnp.arange(out - 1).astype(sample.dtype) + sample) * step).astype(jnp.int64) - (sample * step).astype(jnp.int64)
    return jnp.concatenate([places, last], -1)


def _window_positions(x: Array, window: Sequence[int], out: Sequence[int], samples: Array) -> Array:
    """Flat positions of all windows' elements: (N, C, *out, prod(window)). Samples are ordered from the last dim to the first."""
    rank = len(window)
    size = x.shape[-rank:]
    flat = jnp.zeros((), jnp.int64)
    for d in range(rank):
        # torch's 3-d kernel takes its samples in the order of the dims, its 2-d kernel in reverse.
        sample = samples[..., d if rank == 3 else rank - 1 - d]
        at = _starts(sample, size[d], out[d], window[d])[..., None] + jnp.arange(window[d])
        shape = [*at.shape[:-2], *[1] * (2 * rank)]
        shape[2 + d], shape[2 + rank + d] = out[d], window[d]
        flat = flat * size[d] + at.reshape(shape)
    full = (*samples.shape[:2], *out, *window)
    return jnp.broadcast_to(flat, full).reshape(*full[: 2 + rank], math.prod(window))


def _fractional_pool(self: Array, kernel_size: Sequence[int], output_size: Sequence[int], random_samples: Array) -> tuple[Array, Array]:
    rank = len(kernel_size)
    x = self if self.ndim == rank + 2 else self[None]
    positions = _window_positions(x, kernel_size, output_size, random_samples[: x.shape[0]])
    n, c = x.shape[:2]
    values = jnp.take_along_axis(x.reshape(n, c, -1), positions.reshape(n, c, -1), axis=2).reshape(positions.shape)
    # The first maximum wins, but the last NaN.
    nan = jnp.isnan(values)
    last_nan = values.shape[-1] - 1 - jnp.argmax(nan[..., ::-1], -1)
    best = jnp.where(jnp.any(nan, -1), last_nan, jnp.argmax(jnp.where(nan, -jnp.inf, values), -1))[..., None]
    out, index = (jnp.take_along_axis(v, best, -1)[..., 0] for v in (values, positions))
    return (out, index) if self.ndim == rank + 2 else (out[0], index[0])


@lowering(aten.fractional_max_pool2d.default)
def _fractional_max_pool2d(
    self: Array, kernel_size: Sequence[int], output_size: Sequence[int], random_samples: Array
) -> tuple[Array, Array]:
    return _fractional_pool(self, kernel_size, output_size, random_samples)


@lowering(aten.fractional_max_pool3d.default)
def _fractional_max_pool3d(
    self: Array, kernel_size: Sequence[int], output_size: Sequence[int], random_samples: Array
) -> tuple[Array, Array]:
    return _fractional_pool(self, kernel_size, output_size, random_samples)


def _planes(x: Array, rank: int) -> Array:
    """(..., spatial) with every leading dim merged into one and the spatial dims into the other."""
    return x.reshape(math.prod(x.shape[:-rank]), math.prod(x.shape[-rank:]))


@lowering(aten.fractional_max_pool2d_backward.default, aten.fractional_max_pool3d_backward.default)
def _fractional_pool_backward(
    grad_output: Array, self: Array, kernel_size: Sequence[int], output_size: Sequence[int], indices: Array
) -> Array:
    rank = len(kernel_size)
    grads, places = _planes(grad_output, rank), _planes(indices, rank)
    rows = jnp.arange(grads.shape[0])[:, None]
    return jnp.zeros_like(_planes(self, rank)).at[rows, places].add(grads).reshape(self.shape)


def _unpool(self: Array, indices: Array, output_size: Sequence[int]) -> Array:
    rank = len(output_size)
    values, places = _planes(self, rank), _planes(indices, rank)
    out = jnp.zeros((values.shape[0], math.prod(output_size)), self.dtype)
    return out.at[jnp.arange(values.shape[0])[:, None], places].set(values).reshape(*self.shape[:-rank], *output_size)


@lowering(aten.max_unpool2d.default)
def _max_unpool2d(self: Array, indices: Array, output_size: Sequence[int]) -> Array:
    return _unpool(self, indices, output_size)


@lowering(aten.max_unpool3d.default)
def _max_unpool3d(self: Array, indices: Array, output_size: Sequence[int], stride: Sequence[int], padding: Sequence[int]) -> Array:
    """Stride and padding only serve torch's check of the sizes."""
    return _unpool(self, indices, output_size)
