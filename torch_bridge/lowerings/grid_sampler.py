"""`grid_sample` in two and three dims: values of an image at positions given as data.

Clipping and reflection are written so that `jax.vjp` gives torch's gradients: 0 at and beyond the border.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import torch
from jax import lax

from torch_bridge.lowerings._opmath import widen
from torch_bridge.lowerings.registry import lowering
from torch_bridge.lowerings.upsample import cubic_weights

aten = torch.ops.aten

_BILINEAR, _NEAREST, _BICUBIC = 0, 1, 2
_ZEROS, _BORDER, _REFLECTION = 0, 1, 2


def _to_pixels(c: jax.Array, size: int, align_corners: bool) -> jax.Array:
    """Coordinates in [-1, 1] as pixel positions."""
    return (c + 1) / 2 * (size - 1) if align_corners else ((c + 1) * size - 1) / 2


def _clip(c: jax.Array, size: int, nan_is_last: bool) -> jax.Array:
    """nan_is_last: which border a NaN is taken for; torch's CPU kernels say the first in two dims and the last in three."""
    inner = jnp.where(c > 0, c, 0)
    return jnp.where(c < size - 1, inner, size - 1) if nan_is_last else jnp.where(c >= size - 1, size - 1, inner)


def _reflect(c: jax.Array, size: int, align_corners: bool) -> jax.Array:
    """Mirrored at pixel centres (align_corners) or at pixel edges."""
    low, span = (0.0, float(size - 1)) if align_corners else (-0.5, float(size))
    if span == 0:
        return jnp.zeros_like(c)
    c = c - low
    c = jnp.where(c < 0, -c, c)
    rest = lax.rem(c, jnp.full_like(c, span))
    flips = lax.stop_gradient(jnp.floor(c / span))
    return jnp.where(flips % 2 == 0, rest + low, span - rest + low)


def _padded(c: jax.Array, size: int, mode: int, align_corners: bool, dims: int = 2) -> jax.Array:
    if mode == _REFLECTION:
        c = _reflect(c, size, align_corners)
    return c if mode == _ZEROS else _clip(c, size, nan_is_last=dims == 3)


def _look_up(image: jax.Array, at: Sequence[jax.Array]) -> jax.Array:
    """image [N, C, *sizes] at whole pixel positions (one float array [N, P] a dim) -> [N, C, P]; outside the image 0."""
    sizes = image.shape[2:]
    flat, inside = jnp.zeros(at[0].shape, jnp.int32), jnp.ones(at[0].shape, jnp.bool_)
    for c, size in zip(at, sizes, strict=True):
        inside = inside & (c >= 0) & (c <= size - 1)
        flat = flat * size + jnp.clip(jnp.nan_to_num(c), 0, size - 1).astype(jnp.int32)
    picked = jax.vmap(lambda img, i: jnp.take(img, i, axis=1))(image.reshape(*image.shape[:2], math.prod(sizes)), flat)
    return jnp.where(inside[:, None], picked, 0)


def _linear(image: jax.Array, at: Sequence[jax.Array]) -> jax.Array:
    lows = [lax.stop_gradient(jnp.floor(c)) for c in at]
    terms = []
    for corner in itertools.product((0, 1), repeat=len(at)):
        weights = [(c - low) if up else (low + 1 - c) for c, low, up in zip(at, lows, corner, strict=True)]
        value = _look_up(image, [low + up for low, up in zip(lows, corner, strict=True)])
        terms.append(value * functools.reduce(jnp.multiply, weights)[:, None])
    return functools.reduce(jnp.add, terms)


def _linear_volume(image: jax.Array, at: Sequence[jax.Array]) -> jax.Array:
    """In three dims, torch takes a coordinate that is NaN or infinite for one outside the volume. (In two, NaN comes of it.)"""
    found = functools.reduce(jnp.logical_and, [jnp.isfinite(c) for c in at])
    return jnp.where(found[:, None], _linear(image, [jnp.where(found, c, 0) for c in at]), 0)


def _bicubic(image: jax.Array, at: Sequence[jax.Array], padding_mode: int, align_corners: bool) -> jax.Array:
    lows = [lax.stop_gradient(jnp.floor(c)) for c in at]
    wy, wx = (cubic_weights(c - low) for c, low in zip(at, lows, strict=True))
    terms = []
    for (i, y), (j, x) in itertools.product(enumerate(wy), enumerate(wx)):
        taps = [_padded(low + k - 1, size, padding_mode, align_corners) for low, k, size in zip(lows, (i, j), image.shape[2:], strict=True)]
        terms.append(_look_up(image, taps) * (y * x)[:, None])
    return functools.reduce(jnp.add, terms)


def _sample(image: jax.Array, grid: jax.Array, mode: int, padding_mode: int, align_corners: bool) -> jax.Array:
    """image [N, C, *sizes], grid [N, *out, n] with the last dim's coordinate first -> [N, C, *out]."""
    n, out = grid.shape[-1], grid.shape[1:-1]
    points = grid.reshape(grid.shape[0], math.prod(out), n)
    at = [_to_pixels(points[..., n - 1 - d], size, align_corners) for d, size in enumerate(image.shape[2:])]
    if mode == _BICUBIC:
        result = _bicubic(image, at, padding_mode, align_corners)
    else:
        at = [_padded(c, size, padding_mode, align_corners, n) for c, size in zip(at, image.shape[2:], strict=True)]
        if mode == _NEAREST:
            result = _look_up(image, [lax.stop_gradient(jnp.round(c)) for c in at])
        else:
            result = _linear_volume(image, at) if n == 3 else _linear(image, at)
    return result.reshape(*image.shape[:2], *out)


@lowering(aten.grid_sampler_2d.default, aten.grid_sampler_3d.default)
def grid_sampler(input: jax.Array, grid: jax.Array, interpolation_mode: int, padding_mode: int, align_corners: bool) -> jax.Array:
    return _sample(widen(input), widen(grid), interpolation_mode, padding_mode, align_corners).astype(input.dtype)


@lowering(aten.grid_sampler_2d_backward.default, aten.grid_sampler_3d_backward.default)
def grid_sampler_backward(
    grad_output: jax.Array,
    input: jax.Array,
    grid: jax.Array,
    interpolation_mode: int,
    padding_mode: int,
    align_corners: bool,
    output_mask: Sequence[bool],
) -> tuple[jax.Array | None, jax.Array]:
    _, vjp = jax.vjp(lambda x, g: grid_sampler(x, g, interpolation_mode, padding_mode, align_corners), input, grid)
    grad_input, grad_grid = vjp(grad_output)
    return (grad_input if output_mask[0] else None), grad_grid
