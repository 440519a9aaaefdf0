"""`masked_fill`, `masked_scatter`, masked indexing and their gradients: static shapes, whatever the mask selects."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax.numpy as jnp
import torch

from torch_bridge.ir import dtypes
from torch_bridge.lowerings.indexing import Points, index, index_put
from torch_bridge.lowerings.registry import lowering
from torch_bridge.lowerings.types import Array, Operand, Scalar

aten = torch.ops.aten


@lowering(aten.masked_fill.Scalar, aten.masked_fill.Tensor)
def masked_fill(self: Array, mask: Array, value: Operand) -> Array:
    return jnp.where(mask != 0, dtypes.cast(value, self.dtype), self)


def _rank(mask: Array) -> Array:
    """For each position of a flat mask, how many True ones come before or at it, less one (-1 before the first)."""
    wide = jnp.int32 if mask.size < 2**31 else jnp.int64
    return jnp.cumsum(mask.astype(wide), dtype=wide) - 1


@lowering(aten.masked_scatter.default)
def masked_scatter(self: Array, mask: Array, source: Array) -> Array:
    """The k-th True position, row-major, takes the k-th element of `source`."""
    x, mask = jnp.broadcast_arrays(self, mask != 0)
    if source.size == 0:  # torch has checked that then nothing is True
        return x
    rank = jnp.maximum(_rank(mask.reshape(-1)), 0)
    taken = Points((source.size,), {0: rank}, wrap=False).read(source.reshape(-1))
    return jnp.where(mask, taken.reshape(x.shape).astype(x.dtype), x)


@lowering(aten.masked_scatter_backward.default)
def masked_scatter_backward(grad_output: Array, mask: Array, sizes: Sequence[int]) -> Array:
    """The gradient of `source`: the selected gradients, then zeros."""
    numel = math.prod(sizes)
    grad, mask = jnp.broadcast_arrays(grad_output, mask != 0)
    flat_mask = mask.reshape(-1)
    target = jnp.where(flat_mask, _rank(flat_mask), numel)  # one past the end is dropped
    out = jnp.zeros(numel, grad.dtype)
    return Points((numel,), {0: target}, wrap=False).write(out, grad.reshape(-1)).reshape(tuple(sizes))


def _within(self: Array, indices: Sequence[Array | None]) -> list[Array | None]:
    """Indices that may be anything where a mask is False, moved to the nearest position that exists."""
    return [None if i is None else jnp.clip(i, -n, n - 1) for i, n in zip(indices, self.shape, strict=False)]


@lowering(aten._unsafe_masked_index.default)
def unsafe_masked_index(self: Array, mask: Array, indices: Sequence[Array | None], fill: Scalar) -> Array:
    """`self[indices]` where the mask is True, `fill` elsewhere."""
    return jnp.where(mask != 0, index(self, _within(self, indices)), dtypes.cast(fill, self.dtype))


@lowering(aten._unsafe_masked_index_put_accumulate.default)
def unsafe_masked_index_put_accumulate(self: Array, mask: Array, indices: Sequence[Array | None], values: Array) -> Array:
    """Add the values whose mask is True at their indices."""
    if self.size == 0:
        return self
    kept = jnp.where(mask != 0, values, jnp.zeros((), values.dtype))
    return index_put(self, _within(self, indices), kept, accumulate=True)
