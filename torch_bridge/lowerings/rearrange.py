"""Joining, repeating, reversing and masking whole tensors: `cat`, `repeat`, `flip`, `roll`, `tril`, pixel and channel shuffles."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import torch
from jax import lax

from torch_bridge.ir import dtypes
from torch_bridge.lowerings.registry import lowering
from torch_bridge.lowerings.shapes import wrap_dim

aten = torch.ops.aten
Array = jax.Array


@lowering(aten.cat.default)
def cat(tensors: Sequence[Array], dim: int = 0) -> Array:
    """1-d tensors without elements are skipped whatever the others' shapes are, as torch still does, but count for the dtype."""
    cast = dtypes.promote(*tensors)
    kept = [x for x in cast if x.shape != (0,)]
    if len(kept) < 2:
        return kept[0] if kept else cast[0]
    return lax.concatenate(kept, wrap_dim(dim, kept[0].ndim))


@lowering(aten.stack.default, aten._stack.default)
def stack(tensors: Sequence[Array], dim: int = 0) -> Array:
    return jnp.stack(dtypes.promote(*tensors), axis=dim)


@lowering(aten.block_diag.default)
def block_diag(tensors: Sequence[Array]) -> Array:
    """0-d and 1-d tensors are single rows."""
    if not tensors:
        return jnp.zeros((1, 0), dtypes.to_jax(torch.get_default_dtype()))
    blocks = [x.reshape(1, -1) if x.ndim < 2 else x for x in dtypes.promote(*tensors)]
    width, left, rows = sum(b.shape[1] for b in blocks), 0, []
    for block in blocks:
        rows.append(jnp.pad(block, ((0, 0), (left, width - left - block.shape[1]))))
        left += block.shape[1]
    return lax.concatenate(rows, 0)


@lowering(aten.repeat.default)
def repeat(self: Array, repeats: Sequence[int]) -> Array:
    return jnp.tile(self, tuple(repeats))


@lowering(aten.flip.default)
def flip(self: Array, dims: Sequence[int]) -> Array:
    return lax.rev(self, [wrap_dim(d, self.ndim) for d in dims]) if self.ndim else self


@lowering(aten.roll.default)
def roll(self: Array, shifts: Sequence[int | dtypes.Scalar], dims: Sequence[int] = ()) -> Array:
    """Without `dims` the flattened tensor rolls."""
    if not dims:
        return roll(self.reshape(-1), shifts, [0]).reshape(self.shape) if self.ndim else self
    x = self
    for shift, dim in zip(shifts, dims, strict=True):
        dim = wrap_dim(dim, x.ndim)
        size = x.shape[dim] if x.ndim else 0
        if isinstance(shift, dtypes.Scalar):
            x = lax.dynamic_slice_in_dim(lax.concatenate([x, x], dim), -shift.value % size, size, dim) if size else x
            continue
        cut = -shift % size if size else 0
        if cut:
            x = lax.concatenate([lax.slice_in_dim(x, cut, size, 1, dim), lax.slice_in_dim(x, 0, cut, 1, dim)], dim)
    return x


@lowering(aten.rot90.default)
def rot90(self: Array, k: int = 1, dims: Sequence[int] = (0, 1)) -> Array:
    return jnp.rot90(self, k, (dims[0], dims[1]))


@lowering(aten.tril.default)
def tril(self: Array, diagonal: int | dtypes.Scalar = 0) -> Array:
    return jnp.where(_column_minus_row(self) <= dtypes.plain(diagonal), self, jnp.zeros((), self.dtype))


@lowering(aten.triu.default)
def triu(self: Array, diagonal: int | dtypes.Scalar = 0) -> Array:
    return jnp.where(_column_minus_row(self) >= dtypes.plain(diagonal), self, jnp.zeros((), self.dtype))


def _column_minus_row(x: Array) -> Array:
    shape = x.shape[-2:]
    return lax.broadcasted_iota(jnp.int64, shape, 1) - lax.broadcasted_iota(jnp.int64, shape, 0)


@lowering(aten.pixel_shuffle.default)
def pixel_shuffle(self: Array, upscale_factor: int) -> Array:
    r = upscale_factor
    *batch, c, h, w = self.shape
    n = len(batch)
    x = self.reshape(*batch, c // (r * r), r, r, h, w)
    x = jnp.transpose(x, (*range(n), n, n + 3, n + 1, n + 4, n + 2))
    return x.reshape(*batch, c // (r * r), h * r, w * r)


@lowering(aten.pixel_unshuffle.default)
def pixel_unshuffle(self: Array, downscale_factor: int) -> Array:
    r = downscale_factor
    *batch, c, h, w = self.shape
    n = len(batch)
    x = self.reshape(*batch, c, h // r, r, w // r, r)
    x = jnp.transpose(x, (*range(n), n, n + 2, n + 4, n + 1, n + 3))
    return x.reshape(*batch, c * r * r, h // r, w // r)


@lowering(aten.channel_shuffle.default)
def channel_shuffle(self: Array, groups: int) -> Array:
    n, c, *rest = self.shape
    return jnp.swapaxes(self.reshape(n, groups, c // groups, *rest), 1, 2).reshape(self.shape)
