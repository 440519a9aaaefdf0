"""Max pooling with torch's indices: flat positions in the input's trailing dims, the first of equal maxima, the last of NaNs.

Pooled one dim after the other, carrying (value, flat position) pairs; the position costs nothing when nobody reads it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from torch_bridge.lowerings._opmath import widen
from torch_bridge.lowerings.pooling import Window, _expand, adaptive_bounds, along, pad_axis, tap_slice, windows
from torch_bridge.lowerings.registry import lowering

aten = torch.ops.aten
Pair = tuple[jax.Array, jax.Array]


def _lowest(dtype) -> float | int:
    return -math.inf if jnp.issubdtype(dtype, jnp.floating) else int(jnp.iinfo(dtype).min)


def _better(new: Pair, old: Pair) -> Pair:
    """The pair that torch keeps when `new` comes after `old` in the window."""
    take = (new[0] > old[0]) | (new[0] != new[0])
    return jnp.where(take, new[0], old[0]), jnp.where(take, new[1], old[1])


def _positions(x: jax.Array, n: int) -> jax.Array:
    """Flat position of every element in the trailing n dims."""
    return jnp.broadcast_to(jnp.arange(math.prod(x.shape[-n:]), dtype=jnp.int32).reshape(x.shape[-n:]), x.shape)


def _doubled(pair: Pair, axis: int, w: Window) -> Pair:
    """For long windows: pairs over 2, 4, 8, ... taps, then two overlapping ones make the window."""
    reach = 1
    while reach * 2 <= w.kernel:
        shift = reach * w.dilation
        n = pair[0].shape[axis]
        pair = _better(*(tuple(lax.slice_in_dim(a, lo, n - shift + lo, axis=axis) for a in pair) for lo in (shift, 0)))
        reach *= 2
    first = tuple(tap_slice(a, axis, w, 0) for a in pair)
    if reach == w.kernel:
        return first
    return _better(tuple(tap_slice(a, axis, w, w.kernel - reach) for a in pair), first)


def _max_axis(pair: Pair, axis: int, w: Window) -> Pair:
    value, index = pair
    lowest = _lowest(value.dtype)
    padded = pad_axis(value, axis, w.pad_to(), lowest), pad_axis(index, axis, w.pad_to(), 0)
    if w.kernel > 32:
        best = _doubled(padded, axis, w)
    else:
        best = tuple(tap_slice(a, axis, w, 0) for a in padded)
        for tap in range(1, w.kernel):
            best = _better(tuple(tap_slice(a, axis, w, tap) for a in padded), best)
    if w.pad_to() == (0, 0):
        return best
    # where nothing exceeds the padding, torch reports the window's first element on the input
    first = jnp.take(index, w.first(), axis=axis)
    return best[0], jnp.where(best[0] == lowest, first, best[1])


def _max_pool(x: jax.Array, wins: list[Window]) -> Pair:
    n = len(wins)
    pair = x, _positions(x, n)
    for axis in range(-1, -n - 1, -1):
        pair = _max_axis(pair, axis, wins[axis])
    return pair[0], pair[1].astype(jnp.int64)


@lowering(aten.max_pool2d_with_indices.default)
def max_pool2d_with_indices(self, kernel_size, stride=(), padding=0, dilation=1, ceil_mode=False):
    return _max_pool(self, windows(self.shape[-2:], kernel_size, stride, padding, dilation, ceil_mode))


@lowering(aten.max_pool3d_with_indices.default)
def max_pool3d_with_indices(self, kernel_size, stride=(), padding=0, dilation=1, ceil_mode=False):
    return _max_pool(self, windows(self.shape[-3:], kernel_size, stride, padding, dilation, ceil_mode))


def _scatter(grad: jax.Array, indices: jax.Array, like: jax.Array, n: int) -> jax.Array:
    """Add each gradient at its flat position."""
    planes = math.prod(like.shape[:-n])
    flat = jnp.zeros((planes, math.prod(like.shape[-n:])), widen(grad).dtype)
    rows = jnp.arange(planes)[:, None]
    flat = flat.at[rows, indices.reshape(planes, -1)].add(widen(grad).reshape(planes, -1))
    return flat.reshape(like.shape).astype(like.dtype)


def _unpool(grad: jax.Array, indices: jax.Array, like: jax.Array, wins: list[Window]) -> jax.Array:
    """The gradient without a scatter: for every tap, the gradients whose maximum was that tap, spread over the input and added."""
    n = len(wins)
    strides = [math.prod(like.shape[like.ndim - n + i + 1 :]) for i in range(n)]
    grad_wide, total = widen(grad), 0
    for taps in np.ndindex(*(w.kernel for w in wins)):
        at = sum(along((w.starts + t * w.dilation) * s, i, n) for i, (w, t, s) in enumerate(zip(wins, taps, strides, strict=True)))
        inside = np.logical_and.reduce(np.broadcast_arrays(*(along(w.valid(t), i, n) for i, (w, t) in enumerate(zip(wins, taps, strict=True)))))
        here = jnp.where((indices == jnp.asarray(at)) & inside, grad_wide, 0)
        edges = [(0, 0, 0)] * (like.ndim - n) + [_spread(w, t) for w, t in zip(wins, taps, strict=True)]
        total = total + lax.pad(here, jnp.zeros((), here.dtype), edges)
    return total.astype(like.dtype)


def _spread(w: Window, tap: int) -> tuple[int, int, int]:
    """The `lax.pad` of one dim that puts window i's value at its tap `tap` on the input."""
    low = tap * w.dilation - w.padding
    return low, w.size - low - ((w.out - 1) * w.stride + 1), w.stride - 1


def _max_pool_backward(grad, like, wins, indices):
    if math.prod(w.kernel for w in wins) <= 16 and grad.size:
        return _unpool(grad, indices, like, wins)
    return _scatter(grad, indices, like, len(wins))


@lowering(aten.max_pool2d_with_indices_backward.default)
def max_pool2d_with_indices_backward(grad_output, self, kernel_size, stride, padding, dilation, ceil_mode, indices):
    return _max_pool_backward(grad_output, self, windows(self.shape[-2:], kernel_size, stride, padding, dilation, ceil_mode), indices)


@lowering(aten.max_pool3d_with_indices_backward.default)
def max_pool3d_with_indices_backward(grad_output, self, kernel_size, stride, padding, dilation, ceil_mode, indices):
    return _max_pool_backward(grad_output, self, windows(self.shape[-3:], kernel_size, stride, padding, dilation, ceil_mode), indices)


def _adaptive_max_axis(pair: Pair, axis: int, out: int) -> Pair:
    size = pair[0].shape[axis]
    if out and size % out == 0:
        return _max_axis(pair, axis, Window(size, size // out, size // out, 0, 1, out))
    start, end = adaptive_bounds(size, out)
    best = tuple(jnp.take(a, start, axis=axis) for a in pair)
    for tap in range(1, int(max(end - start, default=1))):
        # a shorter window sees its last element again, which changes nothing
        best = _better(tuple(jnp.take(a, np.minimum(start + tap, end - 1), axis=axis) for a in pair), best)
    return best


def _adaptive_max_pool(x: jax.Array, output_size: Sequence[int], n: int) -> Pair:
    sizes = _expand(output_size, n)
    pair = x, _positions(x, n)
    for axis in range(-1, -n - 1, -1):
        pair = _adaptive_max_axis(pair, axis, sizes[axis])
    return pair[0], pair[1].astype(jnp.int64)


@lowering(aten.adaptive_max_pool2d.default)
def adaptive_max_pool2d(self, output_size):
    return _adaptive_max_pool(self, output_size, 2)


@lowering(aten.adaptive_max_pool3d.default)
def adaptive_max_pool3d(self, output_size):
    return _adaptive_max_pool(self, output_size, 3)


@lowering(aten.adaptive_max_pool2d_backward.default)
def adaptive_max_pool2d_backward(grad_output, self, indices):
    return _scatter(grad_output, indices, self, 2)


@lowering(aten.adaptive_max_pool3d_backward.default)
def adaptive_max_pool3d_backward(grad_output, self, indices):
    return _scatter(grad_output, indices, self, 3)
