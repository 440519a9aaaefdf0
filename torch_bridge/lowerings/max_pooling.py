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
from torch_bridge.lowerings.pooling import Ints, Window, _expand, adaptive_bounds, pad_axis, tap_slice, windows
from torch_bridge.lowerings.registry import lowering
from torch_bridge.lowerings.types import DType

aten = torch.ops.aten
Pair = tuple[jax.Array, jax.Array]


def _tap(pair: Pair, axis: int, w: Window, tap: int) -> Pair:
    return tap_slice(pair[0], axis, w, tap), tap_slice(pair[1], axis, w, tap)


def _picked(pair: Pair, axis: int, at: np.ndarray) -> Pair:
    return jnp.take(pair[0], at, axis=axis), jnp.take(pair[1], at, axis=axis)


def _range(pair: Pair, axis: int, start: int, end: int) -> Pair:
    return lax.slice_in_dim(pair[0], start, end, axis=axis), lax.slice_in_dim(pair[1], start, end, axis=axis)


def _lowest(dtype: DType) -> float | int:
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
        pair = _better(_range(pair, axis, shift, n), _range(pair, axis, 0, n - shift))
        reach *= 2
    first = _tap(pair, axis, w, 0)
    return first if reach == w.kernel else _better(_tap(pair, axis, w, w.kernel - reach), first)


def _max_axis(pair: Pair, axis: int, w: Window) -> Pair:
    value, index = pair
    lowest = _lowest(value.dtype)
    padded = pad_axis(value, axis, w.pad_to(), lowest), pad_axis(index, axis, w.pad_to(), 0)
    if w.kernel > 32:
        best = _doubled(padded, axis, w)
    else:
        best = _tap(padded, axis, w, 0)
        for tap in range(1, w.kernel):
            best = _better(_tap(padded, axis, w, tap), best)
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


@lowering(aten.max_pool2d_with_indices.default, once=True)
def max_pool2d_with_indices(
    self: jax.Array,
    kernel_size: Ints,
    stride: Ints = (),
    padding: Ints = 0,
    dilation: Ints = 1,
    ceil_mode: bool = False,
) -> Pair:
    return _max_pool(self, windows(self.shape[-2:], kernel_size, stride, padding, dilation, ceil_mode))


@lowering(aten.max_pool3d_with_indices.default)
def max_pool3d_with_indices(
    self: jax.Array,
    kernel_size: Ints,
    stride: Ints = (),
    padding: Ints = 0,
    dilation: Ints = 1,
    ceil_mode: bool = False,
) -> Pair:
    return _max_pool(self, windows(self.shape[-3:], kernel_size, stride, padding, dilation, ceil_mode))


def _scatter(grad: jax.Array, indices: jax.Array, like: jax.Array, n: int) -> jax.Array:
    """Add each gradient at its flat position (on CPU ten times faster than a sum of shifted copies, one for each tap)."""
    planes = math.prod(like.shape[:-n])
    flat = jnp.zeros((planes, math.prod(like.shape[-n:])), widen(grad).dtype)
    rows = jnp.arange(planes)[:, None]
    pooled = planes, math.prod(grad.shape[-n:])  # not -1, which no batch of 0 has
    flat = flat.at[rows, indices.reshape(pooled)].add(widen(grad).reshape(pooled))
    return flat.reshape(like.shape).astype(like.dtype)


@lowering(aten.max_pool2d_with_indices_backward.default)
def max_pool2d_with_indices_backward(
    grad_output: jax.Array,
    self: jax.Array,
    kernel_size: Ints,
    stride: Ints,
    padding: Ints,
    dilation: Ints,
    ceil_mode: bool,
    indices: jax.Array,
) -> jax.Array:
    return _scatter(grad_output, indices, self, 2)


@lowering(aten.max_pool3d_with_indices_backward.default)
def max_pool3d_with_indices_backward(
    grad_output: jax.Array,
    self: jax.Array,
    kernel_size: Ints,
    stride: Ints,
    padding: Ints,
    dilation: Ints,
    ceil_mode: bool,
    indices: jax.Array,
) -> jax.Array:
    return _scatter(grad_output, indices, self, 3)


def _adaptive_max_axis(pair: Pair, axis: int, out: int) -> Pair:
    size = pair[0].shape[axis]
    if out and size % out == 0:
        return _max_axis(pair, axis, Window(size, size // out, size // out, 0, 1, out))
    start, end = adaptive_bounds(size, out)
    best = _picked(pair, axis, start)
    for tap in range(1, int(max(end - start, default=1))):
        # a shorter window sees its last element again, which changes nothing
        best = _better(_picked(pair, axis, np.minimum(start + tap, end - 1)), best)
    return best


def _adaptive_max_pool(x: jax.Array, output_size: Sequence[int], n: int) -> Pair:
    sizes = _expand(output_size, n)
    pair = x, _positions(x, n)
    for axis in range(-1, -n - 1, -1):
        pair = _adaptive_max_axis(pair, axis, sizes[axis])
    return pair[0], pair[1].astype(jnp.int64)


@lowering(aten.adaptive_max_pool2d.default)
def adaptive_max_pool2d(self: jax.Array, output_size: Sequence[int]) -> Pair:
    return _adaptive_max_pool(self, output_size, 2)


@lowering(aten.adaptive_max_pool3d.default)
def adaptive_max_pool3d(self: jax.Array, output_size: Sequence[int]) -> Pair:
    return _adaptive_max_pool(self, output_size, 3)


@lowering(aten.adaptive_max_pool2d_backward.default)
def adaptive_max_pool2d_backward(grad_output: jax.Array, self: jax.Array, indices: jax.Array) -> jax.Array:
    return _scatter(grad_output, indices, self, 2)


@lowering(aten.adaptive_max_pool3d_backward.default)
def adaptive_max_pool3d_backward(grad_output: jax.Array, self: jax.Array, indices: jax.Array) -> jax.Array:
    return _scatter(grad_output, indices, self, 3)
