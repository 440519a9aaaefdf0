"""Average pooling, fixed and adaptive, over the trailing 1, 2 or 3 dims; and what max pooling shares with it.

A window is pooled one dim after the other, as sums of strided slices: XLA compiles those to vector code on CPU (a
`reduce_window` and its gradient are many times slower), and the work grows with the sum of the kernel sizes, not their product.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from torch_bridge.lowerings._opmath import widen
from torch_bridge.lowerings.registry import lowering

aten = torch.ops.aten
Ints = int | Sequence[int]


@dataclass(frozen=True)
class Window:
    """The windows along one dim: `out` of them, each `kernel` taps `dilation` apart, on `size` elements padded by `padding`."""

    size: int
    kernel: int
    stride: int
    padding: int
    dilation: int
    out: int

    @property
    def starts(self) -> np.ndarray:
        return np.arange(self.out) * self.stride - self.padding

    def first(self) -> np.ndarray:
        """Per window, the first position on the input."""
        missing = np.maximum(0, -(self.starts // self.dilation)) if self.padding else np.zeros(self.out, np.int64)
        return self.starts + missing * self.dilation

    def pad_to(self) -> tuple[int, int]:
        """How many elements to add (or, negative, to drop) before and after so that all taps of all windows exist."""
        reach = (self.out - 1) * self.stride + (self.kernel - 1) * self.dilation + 1
        return self.padding, reach - self.padding - self.size


def _expand(values: Ints, n: int) -> list[int]:
    values = [values] if isinstance(values, int) else list(values)
    return values * n if len(values) == 1 else values


def windows(sizes: Sequence[int], kernel: Ints, stride: Ints, padding: Ints, dilation: Ints, ceil_mode: bool) -> list[Window]:
    """torch's output sizes; with `ceil_mode` the last window must start on the input or its left padding."""
    n = len(sizes)
    kernel, padding, dilation = _expand(kernel, n), _expand(padding, n), _expand(dilation, n)
    stride = kernel if isinstance(stride, Sequence) and not stride else _expand(stride, n)
    result = []
    for size, k, s, p, d in zip(sizes, kernel, stride, padding, dilation, strict=True):
        span = size + 2 * p - d * (k - 1) - 1
        out = (span + (s - 1 if ceil_mode else 0)) // s + 1
        if ceil_mode and (out - 1) * s >= size + p:
            out -= 1
        result.append(Window(size, k, s, p, d, out))
    return result


def pad_axis(x: jax.Array, axis: int, edges: tuple[int, int], value: float) -> jax.Array:
    config = [(0, 0, 0)] * x.ndim
    config[axis] = (*edges, 0)
    return x if edges == (0, 0) else lax.pad(x, jnp.asarray(value, x.dtype), config)


def tap_slice(padded: jax.Array, axis: int, w: Window, tap: int) -> jax.Array:
    """Element `tap` of every window."""
    start = tap * w.dilation
    return lax.slice_in_dim(padded, start, start + (w.out - 1) * w.stride + 1, w.stride, axis)


def along(values: np.ndarray, axis: int, ndim: int) -> np.ndarray:
    """A 1-d array shaped to broadcast along one (negative) axis."""
    shape = [1] * ndim
    shape[axis] = len(values)
    return values.reshape(shape)


def _sum_axis(x: jax.Array, axis: int, w: Window) -> jax.Array:
    padded = pad_axis(x, axis, w.pad_to(), 0)
    if w.stride == w.kernel or w.out == 1:  # windows side by side
        axis = axis % x.ndim
        padded = lax.slice_in_dim(padded, 0, w.out * w.kernel, axis=axis)
        return jnp.sum(padded.reshape(*x.shape[:axis], w.out, w.kernel, *x.shape[axis + 1 :]), axis=axis + 1)
    if w.kernel > 32:
        dims, strides = [1] * x.ndim, [1] * x.ndim
        dims[axis], strides[axis] = w.kernel, w.stride
        return lax.reduce_window(padded, np.zeros((), x.dtype)[()], lax.add, dims, strides, "VALID")
    total = tap_slice(padded, axis, w, 0)
    for tap in range(1, w.kernel):
        total = total + tap_slice(padded, axis, w, tap)
    return total


def _divisors(wins: list[Window], count_include_pad: bool, override: int | None) -> np.ndarray:
    """How many elements each window averages over: torch clips windows at the padded edge, or at the input's."""
    result = np.ones((1,) * len(wins), np.int64)
    for i, w in enumerate(wins):
        start, end = w.starts, np.minimum(w.starts + w.kernel, w.size + w.padding)
        count = end - start if count_include_pad else np.minimum(end, w.size) - np.maximum(start, 0)
        result = result * along(count, i - len(wins), len(wins))
    return np.full_like(result, override) if override is not None else result


def _avg_pool(
    x: jax.Array,
    kernel: Ints,
    stride: Ints,
    padding: Ints,
    ceil_mode: bool,
    count_include_pad: bool,
    override: int | None,
    n: int,
) -> jax.Array:
    wins = windows(x.shape[-n:], kernel, stride, padding, 1, ceil_mode)
    total = widen(x)
    for i, w in enumerate(wins):
        total = _sum_axis(total, i - n, w)
    divisor = _divisors(wins, count_include_pad, override)
    if jnp.issubdtype(x.dtype, jnp.integer):
        return lax.div(total, jnp.broadcast_to(jnp.asarray(divisor, x.dtype), total.shape))
    return (total / jnp.asarray(divisor, total.dtype)).astype(x.dtype)


def _transpose(fn: Callable[[jax.Array], jax.Array], grad: jax.Array, like: jax.Array) -> jax.Array:
    """The gradient of a linear function, in the opmath dtype."""
    wide = widen(like)
    return jax.linear_transpose(fn, wide)(grad.astype(wide.dtype))[0].astype(like.dtype)


@lowering(aten.avg_pool1d.default)
def avg_pool1d(
    self: jax.Array,
    kernel_size: Ints,
    stride: Ints = (),
    padding: Ints = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
) -> jax.Array:
    return _avg_pool(self, kernel_size, stride, padding, ceil_mode, count_include_pad, None, 1)


@lowering(aten.avg_pool2d.default)
def avg_pool2d(
    self: jax.Array,
    kernel_size: Ints,
    stride: Ints = (),
    padding: Ints = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> jax.Array:
    return _avg_pool(self, kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override, 2)


@lowering(aten.avg_pool3d.default)
def avg_pool3d(
    self: jax.Array,
    kernel_size: Ints,
    stride: Ints = (),
    padding: Ints = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> jax.Array:
    return _avg_pool(self, kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override, 3)


@lowering(aten.avg_pool2d_backward.default)
def avg_pool2d_backward(
    grad_output: jax.Array,
    self: jax.Array,
    kernel_size: Ints,
    stride: Ints,
    padding: Ints,
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None,
) -> jax.Array:
    options = kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override, 2
    return _transpose(lambda x: _avg_pool(x, *options), grad_output, self)


@lowering(aten.avg_pool3d_backward.default)
def avg_pool3d_backward(
    grad_output: jax.Array,
    self: jax.Array,
    kernel_size: Ints,
    stride: Ints,
    padding: Ints,
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None,
) -> jax.Array:
    options = kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override, 3
    return _transpose(lambda x: _avg_pool(x, *options), grad_output, self)


def adaptive_bounds(size: int, out: int) -> tuple[np.ndarray, np.ndarray]:
    """First and one-past-last element of each adaptive window."""
    i = np.arange(out)
    return i * size // max(out, 1), -((-(i + 1) * size) // max(out, 1))


def _adaptive_sum_axis(x: jax.Array, axis: int, out: int) -> jax.Array:
    size = x.shape[axis]
    if out and size % out == 0 and size:
        return _sum_axis(x, axis, Window(size, size // out, size // out, 0, 1, out))
    start, end = adaptive_bounds(size, out)
    total = jnp.take(x, start, axis=axis)
    for tap in range(1, int(max(end - start, default=0))):
        picked = jnp.take(x, np.minimum(start + tap, size - 1), axis=axis)
        total = total + jnp.where(along(start + tap < end, axis, x.ndim), picked, 0)
    return total


def _adaptive_avg_pool(x: jax.Array, output_size: Ints, n: int) -> jax.Array:
    total, count = widen(x), np.ones((1,) * n, np.int64)
    for i, out in enumerate(_expand(output_size, n)):
        start, end = adaptive_bounds(x.shape[i - n], out)
        total = _adaptive_sum_axis(total, i - n, out)
        count = count * along(end - start, i - n, n)
    return (total / jnp.asarray(count, total.dtype)).astype(x.dtype)


@lowering(aten.adaptive_avg_pool1d.default)
def adaptive_avg_pool1d(self: jax.Array, output_size: Sequence[int]) -> jax.Array:
    return _adaptive_avg_pool(self, output_size, 1)


@lowering(aten._adaptive_avg_pool2d.default)
def adaptive_avg_pool2d(self: jax.Array, output_size: Sequence[int]) -> jax.Array:
    return _adaptive_avg_pool(self, output_size, 2)


@lowering(aten._adaptive_avg_pool3d.default)
def adaptive_avg_pool3d(self: jax.Array, output_size: Sequence[int]) -> jax.Array:
    return _adaptive_avg_pool(self, output_size, 3)


@lowering(aten._adaptive_avg_pool2d_backward.default)
def adaptive_avg_pool2d_backward(grad_output: jax.Array, self: jax.Array) -> jax.Array:
    return _transpose(lambda x: _adaptive_avg_pool(x, grad_output.shape[-2:], 2), grad_output, self)


@lowering(aten._adaptive_avg_pool3d_backward.default)
def adaptive_avg_pool3d_backward(grad_output: jax.Array, self: jax.Array) -> jax.Array:
    return _transpose(lambda x: _adaptive_avg_pool(x, grad_output.shape[-3:], 3), grad_output, self)
