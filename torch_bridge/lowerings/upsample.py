"""Interpolation: nearest, linear, cubic and their antialiased forms, one dim after the other.

All are the same thing, a `Taps`: output i is a weighted sum of input elements at positions that depend only on the sizes, so
positions and weights are constants of the program. The gradient is the transposed `Taps`, gathers again instead of scatters.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from torch_bridge.lowerings._opmath import wide_dtype
from torch_bridge.lowerings.pooling import along
from torch_bridge.lowerings.registry import lowering
from torch_bridge.lowerings.types import DType

aten = torch.ops.aten
Real = type[np.floating]


@dataclass(frozen=True)
class Taps:
    """index [L, out]: positions in the input; weight [L, out], or None where it is 1 (and L is 1)."""

    index: np.ndarray
    weight: np.ndarray | None

    def transposed(self, size: int) -> Taps:
        """From output back to an input of `size` elements. Taps that are not needed have weight 0."""
        out = self.index.shape[1]
        matrix = np.zeros((out, size), np.float64)
        weight = np.ones(self.index.shape) if self.weight is None else self.weight
        np.add.at(matrix, (np.broadcast_to(np.arange(out), self.index.shape), self.index), weight)
        used = matrix != 0
        first = used.argmax(axis=0)
        last = out - used[::-1].argmax(axis=0)
        length = int(np.where(used.any(axis=0), last - first, 1).max(initial=1))
        index = first + np.arange(length)[:, None]
        inside = index < out
        index = np.minimum(index, out - 1)
        return Taps(index, np.where(inside, matrix[index, np.arange(size)], 0))


def _is_repeat(index: np.ndarray, size: int) -> bool:
    return size > 0 and len(index) % size == 0 and np.array_equal(index, np.repeat(np.arange(size), len(index) // size))


def _take(x: jax.Array, axis: int, index: np.ndarray) -> jax.Array:
    size = x.shape[axis]
    if not _is_repeat(index, size):
        return jnp.take(x, index, axis=axis)
    axis, times = axis % x.ndim, len(index) // size
    if times == 1:
        return x
    wide = lax.broadcast_in_dim(x, (*x.shape[: axis + 1], times, *x.shape[axis + 1 :]), [d + (d > axis) for d in range(x.ndim)])
    return wide.reshape(*x.shape[:axis], size * times, *x.shape[axis + 1 :])


def _resample(x: jax.Array, axis: int, taps: Taps) -> jax.Array:
    if taps.weight is None:
        return _take(x, axis, taps.index[0])
    terms = []
    for index, weight in zip(taps.index, taps.weight, strict=True):
        w = along(weight, axis, x.ndim)
        term = _take(x, axis, index) * w.astype(x.dtype)
        terms.append(term if weight.all() else jnp.where(w == 0, 0, term))
    return functools.reduce(jnp.add, terms)


def _sum_repeats(g: jax.Array, axis: int, size: int) -> jax.Array:
    axis = axis % g.ndim
    return jnp.sum(g.reshape(*g.shape[:axis], size, g.shape[axis] // size, *g.shape[axis + 1 :]), axis=axis + 1)


def _resample_back(g: jax.Array, axis: int, taps: Taps, size: int) -> jax.Array:
    if taps.weight is None and _is_repeat(taps.index[0], size):
        return _sum_repeats(g, axis, size)
    return _resample(g, axis, taps.transposed(size))


# --- where each output element looks -----------------------------------------------------------------------------------------------


def _scale(size: int, out: int, align_corners: bool, factor: float | None, real: Real) -> np.floating:
    """Input elements per output element, in the precision torch computes it in."""
    if align_corners:
        return real(size - 1) / real(out - 1) if out > 1 else real(0)
    return real(1.0 / factor) if factor is not None and factor > 0 else real(size) / real(out)


def _nearest(size: int, out: int, factor: float | None, real: Real, *, offset: float = 0.0) -> Taps:
    scale = _scale(size, out, False, factor, real)
    index = np.floor((np.arange(out).astype(real) + real(offset)) * scale).astype(np.int64)
    return Taps(np.minimum(index, size - 1)[None], None)


def _source(size: int, out: int, factor: float | None, real: Real, align_corners: bool) -> np.ndarray:
    scale = _scale(size, out, align_corners, factor, real)
    i = np.arange(out).astype(real)
    return i * scale if align_corners else scale * (i + real(0.5)) - real(0.5)


def _linear(size: int, out: int, factor: float | None, real: Real, *, align_corners: bool) -> Taps:
    if size == out:
        return Taps(np.arange(out)[None], None)
    source = np.maximum(_source(size, out, factor, real, align_corners), 0)
    low = np.minimum(source.astype(np.int64), size - 1)
    part = np.clip(source - low, 0, 1).astype(real)
    return Taps(np.stack([low, np.minimum(low + 1, size - 1)]), np.stack([1 - part, part]))


def cubic_weights(t: jax.Array, a: float = -0.75) -> list[Any]:
    """Weights of the four neighbours of a point `t` behind the second one (Keys' kernel)."""

    def near(x: jax.Array) -> jax.Array:
        return ((a + 2) * x - (a + 3)) * x * x + 1

    def far(x: jax.Array) -> jax.Array:
        return ((a * x - 5 * a) * x + 8 * a) * x - 4 * a

    return [far(t + 1), near(t), near(1 - t), far(2 - t)]


def _cubic(size: int, out: int, factor: float | None, real: Real, *, align_corners: bool) -> Taps:
    source = _source(size, out, factor, real, align_corners)
    low = np.minimum(np.floor(source).astype(np.int64), size - 1)
    part = np.clip(source - low, 0, 1).astype(real)
    index = np.clip(low + np.arange(-1, 3)[:, None], 0, size - 1)
    return Taps(index, np.stack(cubic_weights(part)))


def _triangle(x: np.ndarray) -> np.ndarray:
    return np.maximum(0, 1 - np.abs(x))


def _keys(x: np.ndarray) -> np.ndarray:
    """Keys' kernel with a = -0.5, which torch (as Pillow) uses when antialiasing."""
    x, a = np.abs(x), -0.5
    return np.where(x < 1, ((a + 2) * x - (a + 3)) * x * x + 1, np.where(x < 2, (((x - 5) * x + 8) * x - 4) * a, 0))


def _antialiased(
    size: int, out: int, factor: float | None, real: Real, *, align_corners: bool, kernel: Callable[[np.ndarray], np.ndarray], width: int
) -> Taps:
    """The kernel stretched over as many input elements as one output element covers, weights normalized."""
    scale = _scale(size, out, align_corners, factor, real)
    stretch = max(float(scale), 1.0)
    support = real(width / 2 * stretch)
    centre = scale * (np.arange(out).astype(real) + real(0.5))
    first = np.maximum((centre - support + real(0.5)).astype(np.int64), 0)
    end = np.minimum((centre + support + real(0.5)).astype(np.int64), size)
    index = first + np.arange(int((end - first).max(initial=1)))[:, None]
    weight = np.where(index < end, kernel((index - centre + 0.5) / stretch), 0)
    return Taps(np.minimum(index, size - 1), weight / weight.sum(axis=0))


# --- the ops -----------------------------------------------------------------------------------------------------------------------


def _real(dtype: DType) -> Real:
    return np.float64 if dtype == jnp.float64 else np.float32


def _check_float(op: str, x: jax.Array) -> None:
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise NotImplementedError(
            f"{op} of {x.dtype} is not supported (torch rounds it in its own fixed-point way): convert to float32 first."
        )


def _forward(x: jax.Array, out_sizes: Sequence[int], factors: Sequence[float | None], taps: Callable[..., Taps]) -> jax.Array:
    n, real = len(out_sizes), _real(x.dtype)
    y = x.astype(wide_dtype(x.dtype))
    for d in range(n - 1, -1, -1):
        y = _resample(y, d - n, taps(x.shape[d - n], out_sizes[d], factors[d], real))
    return y.astype(x.dtype)


def _backward(g: jax.Array, in_sizes: Sequence[int], factors: Sequence[float | None], taps: Callable[..., Taps]) -> jax.Array:
    n, real = len(factors), _real(g.dtype)
    y = g.astype(wide_dtype(g.dtype))
    for d in range(n):
        size = in_sizes[d - n]
        y = _resample_back(y, d - n, taps(size, g.shape[d - n], factors[d], real), size)
    return y.astype(g.dtype)


def _register_nearest(n: int, forward: torch._ops.OpOverload, backward: torch._ops.OpOverload, offset: float) -> None:
    taps = partial(_nearest, offset=offset)

    def up(self: jax.Array, output_size: Sequence[int], *scales: float | None, **named: float | None) -> jax.Array:
        return _forward(self, output_size, _factors(n, scales, named), taps)

    def down(
        grad_output: jax.Array, output_size: Sequence[int], input_size: Sequence[int], *scales: float | None, **named: float | None
    ) -> jax.Array:
        return _backward(grad_output, input_size, _factors(n, scales, named), taps)

    lowering(forward)(up)
    lowering(backward)(down)


def _register_smooth(n: int, forward: torch._ops.OpOverload, backward: torch._ops.OpOverload, make: Callable[..., Taps]) -> None:
    def up(self: jax.Array, output_size: Sequence[int], align_corners: bool, *scales: float | None, **named: float | None) -> jax.Array:
        _check_float(str(forward), self)
        return _forward(self, output_size, _factors(n, scales, named), partial(make, align_corners=align_corners))

    def down(
        grad_output: jax.Array,
        output_size: Sequence[int],
        input_size: Sequence[int],
        align_corners: bool,
        *scales: float | None,
        **named: float | None,
    ) -> jax.Array:
        return _backward(grad_output, input_size, _factors(n, scales, named), partial(make, align_corners=align_corners))

    lowering(forward)(up)
    lowering(backward)(down)


def _factors(n: int, scales: Sequence[float | None], named: dict[str, float | None]) -> list[float | None]:
    """The scale arguments, which torch calls `scales` in one dim and `scales_d, scales_h, scales_w` in more."""
    names = ["scales"] if n == 1 else ["scales_d", "scales_h", "scales_w"][3 - n :]
    given = dict(zip(names, scales, strict=False)) | named
    return [given.get(name) for name in names]


_register_nearest(1, aten.upsample_nearest1d.default, aten.upsample_nearest1d_backward.default, 0.0)
_register_nearest(2, aten.upsample_nearest2d.default, aten.upsample_nearest2d_backward.default, 0.0)
_register_nearest(3, aten.upsample_nearest3d.default, aten.upsample_nearest3d_backward.default, 0.0)
_register_nearest(1, aten._upsample_nearest_exact1d.default, aten._upsample_nearest_exact1d_backward.default, 0.5)
_register_nearest(2, aten._upsample_nearest_exact2d.default, aten._upsample_nearest_exact2d_backward.default, 0.5)
_register_nearest(3, aten._upsample_nearest_exact3d.default, aten._upsample_nearest_exact3d_backward.default, 0.5)
_register_smooth(1, aten.upsample_linear1d.default, aten.upsample_linear1d_backward.default, _linear)
_register_smooth(2, aten.upsample_bilinear2d.default, aten.upsample_bilinear2d_backward.default, _linear)
_register_smooth(3, aten.upsample_trilinear3d.default, aten.upsample_trilinear3d_backward.default, _linear)
_register_smooth(2, aten.upsample_bicubic2d.default, aten.upsample_bicubic2d_backward.default, _cubic)
_register_smooth(
    2,
    aten._upsample_bilinear2d_aa.default,
    aten._upsample_bilinear2d_aa_backward.default,
    partial(_antialiased, kernel=_triangle, width=2),
)
_register_smooth(
    2, aten._upsample_bicubic2d_aa.default, aten._upsample_bicubic2d_aa_backward.default, partial(_antialiased, kernel=_keys, width=4)
)
