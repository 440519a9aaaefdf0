"""`im2col` and `col2im` (`nn.Unfold`, `nn.Fold`)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import torch
from jax import lax

from torch_bridge.lowerings.registry import lowering

aten = torch.ops.aten
Array = jax.Array


@lowering(aten.im2col.default)
def im2col(self: Array, kernel_size: Sequence[int], dilation: Sequence[int], padding: Sequence[int], stride: Sequence[int]) -> Array:
    """[N, C, H, W] -> [N, C * kernel, positions]; the batch dim may be missing."""
    x = self if self.ndim == 4 else self[None]
    n, c, *spatial = x.shape
    x = jnp.pad(x, ((0, 0), (0, 0), *((p, p) for p in padding)))
    out = [(s + 2 * p - d * (k - 1) - 1) // t + 1 for s, p, d, k, t in zip(spatial, padding, dilation, kernel_size, stride, strict=True)]
    if list(stride) == list(kernel_size) and list(dilation) == [1, 1]:
        columns = _tiles(x, kernel_size, out)
    else:
        columns = _shifted(x, kernel_size, dilation, stride, out)
    columns = columns.reshape(n, c * math.prod(kernel_size), math.prod(out))
    return columns if self.ndim == 4 else columns[0]


def _tiles(x: Array, kernel: Sequence[int], out: Sequence[int]) -> Array:
    """Patches that do not overlap: a reshape and a transpose."""
    (kh, kw), (oh, ow) = kernel, out
    x = x[:, :, : oh * kh, : ow * kw].reshape(*x.shape[:2], oh, kh, ow, kw)
    return jnp.transpose(x, (0, 1, 3, 5, 2, 4))


def _shifted(x: Array, kernel: Sequence[int], dilation: Sequence[int], stride: Sequence[int], out: Sequence[int]) -> Array:
    """One strided slice per kernel position."""
    (dh, dw), (th, tw) = dilation, stride
    span_h, span_w = (out[0] - 1) * th + 1, (out[1] - 1) * tw + 1
    slices = [
        lax.slice(x, (0, 0, i * dh, j * dw), (*x.shape[:2], i * dh + span_h, j * dw + span_w), (1, 1, th, tw))
        for i in range(kernel[0])
        for j in range(kernel[1])
    ]
    return jnp.stack(slices, axis=2)


@lowering(aten.col2im.default)
def col2im(
    self: Array,
    output_size: Sequence[int],
    kernel_size: Sequence[int],
    dilation: Sequence[int],
    padding: Sequence[int],
    stride: Sequence[int],
) -> Array:
    """The transpose of `im2col`: overlapping patches add up."""
    channels = self.shape[-2] // math.prod(kernel_size)
    image = jax.ShapeDtypeStruct((*self.shape[:-2], channels, *output_size), self.dtype)
    (out,) = jax.linear_transpose(lambda x: im2col(x, kernel_size, dilation, padding, stride), image)(self)
    return out
