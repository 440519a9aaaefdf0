"""Constant, reflecting and replicating pads and their gradients, as slices and concatenations rather than gathers.

torch lists pads from the last dim backwards, (left, right) each; negative pads crop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import torch
from jax import lax

from torch_bridge.ir import dtypes
from torch_bridge.lowerings.registry import lowering
from torch_bridge.lowerings.types import Array, Scalar

aten = torch.ops.aten


@lowering(aten.constant_pad_nd.default)
def constant_pad_nd(self: Array, pad: Sequence[int], value: Scalar = 0) -> Array:
    config = [(0, 0, 0)] * self.ndim
    for i in range(len(pad) // 2):
        config[-1 - i] = (pad[2 * i], pad[2 * i + 1], 0)
    return lax.pad(self, dtypes.cast(value, self.dtype), config)


def _pad_each_dim(x: Array, padding: Sequence[int], border: Callable[[Array, int, int, int], list[Array]]) -> Array:
    """Grow each padded dim by its borders, then crop where the pad is negative (the borders look at the whole input)."""
    for i in range(len(padding) // 2):
        low, high, dim = padding[2 * i], padding[2 * i + 1], x.ndim - 1 - i
        pieces = [p for p in border(x, dim, max(low, 0), max(high, 0)) if p.size or not x.size]
        x = lax.concatenate(pieces, dim)
        x = lax.slice_in_dim(x, max(-low, 0), x.shape[dim] - max(-high, 0), 1, dim)
    return x


def _reflected(x: Array, dim: int, low: int, high: int) -> list[Array]:
    size = x.shape[dim]
    left = lax.rev(lax.slice_in_dim(x, 1, low + 1, 1, dim), [dim]) if low else None
    right = lax.rev(lax.slice_in_dim(x, size - 1 - high, size - 1, 1, dim), [dim]) if high else None
    return [p for p in (left, x, right) if p is not None]


def _replicated(x: Array, dim: int, low: int, high: int) -> list[Array]:
    size = x.shape[dim]

    def edge(at: int, times: int) -> Array:
        shape = list(x.shape)
        shape[dim] = times
        return jnp.broadcast_to(lax.slice_in_dim(x, at, at + 1, 1, dim), shape)

    return ([edge(0, low)] if low else []) + [x] + ([edge(size - 1, high)] if high else [])


@lowering(aten.reflection_pad1d.default, aten.reflection_pad2d.default, aten.reflection_pad3d.default)
def reflection_pad(self: Array, padding: Sequence[int]) -> Array:
    return _pad_each_dim(self, padding, _reflected)


@lowering(aten.replication_pad1d.default, aten.replication_pad2d.default, aten.replication_pad3d.default)
def replication_pad(self: Array, padding: Sequence[int]) -> Array:
    return _pad_each_dim(self, padding, _replicated)


def _transposed(pad: Callable[[Array, Sequence[int]], Array], grad: Array, like: Array, padding: Sequence[int]) -> Array:
    """The gradient of a pad, added up in float32 for the 16-bit types."""
    wide = jnp.float32 if grad.dtype.itemsize == 2 else grad.dtype
    sample = jax.ShapeDtypeStruct(like.shape, wide)
    (out,) = jax.linear_transpose(lambda x: pad(x, padding), sample)(grad.astype(wide))
    return out.astype(grad.dtype)


@lowering(aten.reflection_pad1d_backward.default, aten.reflection_pad2d_backward.default, aten.reflection_pad3d_backward.default)
def reflection_pad_backward(grad_output: Array, self: Array, padding: Sequence[int]) -> Array:
    return _transposed(reflection_pad, grad_output, self, padding)


@lowering(aten.replication_pad1d_backward.default, aten.replication_pad2d_backward.default, aten.replication_pad3d_backward.default)
def replication_pad_backward(grad_output: Array, self: Array, padding: Sequence[int]) -> Array:
    return _transposed(replication_pad, grad_output, self, padding)
