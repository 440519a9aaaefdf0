"""Dtype conversion, copies, fills, the `*_like` and `new_*` factories, and complex numbers as pairs of real ones."""

from __future__ import annotations

import jax.numpy as jnp
import torch
from jax import lax

from torch_bridge.ir import dtypes
from torch_bridge.lowerings.precision import convert
from torch_bridge.lowerings.registry import lowering
from torch_bridge.lowerings.types import Array, Operand, Scalar, Shape

aten = torch.ops.aten


@lowering(aten._to_copy.default, cast=True, batches=True)
def to_copy(self: Array, dtype: torch.dtype | None = None) -> Array:
    return self if dtype is None else convert(self, dtypes.to_jax(dtype))


@lowering(aten.clone.default, aten._lazy_clone.default)
def clone(self: Array) -> Array:
    return self


@lowering(aten.copy.default)
def copy(self: Array, src: Array) -> Array:
    return jnp.broadcast_to(convert(src, self.dtype), self.shape)


@lowering(aten.fill.Scalar, aten.fill.Tensor)
def fill(self: Array, value: Operand) -> Array:
    return jnp.broadcast_to(convert(value, self.dtype), self.shape)


def _full(like: Array, size: Shape, value: Operand, dtype: torch.dtype | None) -> Array:
    return jnp.broadcast_to(convert(value, like.dtype if dtype is None else dtypes.to_jax(dtype)), tuple(size))


@lowering(aten.full_like.default)
def full_like(self: Array, fill_value: Scalar, dtype: torch.dtype | None = None) -> Array:
    return _full(self, self.shape, fill_value, dtype)


@lowering(aten.zeros_like.default, aten.empty_like.default)
def zeros_like(self: Array, dtype: torch.dtype | None = None) -> Array:
    return _full(self, self.shape, 0, dtype)


@lowering(aten.ones_like.default)
def ones_like(self: Array, dtype: torch.dtype | None = None) -> Array:
    return _full(self, self.shape, 1, dtype)


@lowering(aten.zero.default)
def zero(self: Array) -> Array:
    return jnp.zeros_like(self)


@lowering(aten.new_full.default)
def new_full(self: Array, size: Shape, fill_value: Scalar, dtype: torch.dtype | None = None) -> Array:
    return _full(self, size, fill_value, dtype)


@lowering(aten.new_zeros.default, aten.new_empty.default)
def new_zeros(self: Array, size: Shape, dtype: torch.dtype | None = None) -> Array:
    return _full(self, size, 0, dtype)


@lowering(aten.new_empty_strided.default)
def new_empty_strided(self: Array, size: Shape, stride: Shape, dtype: torch.dtype | None = None) -> Array:
    return _full(self, size, 0, dtype)


@lowering(aten.new_ones.default)
def new_ones(self: Array, size: Shape, dtype: torch.dtype | None = None) -> Array:
    return _full(self, size, 1, dtype)


@lowering(aten._conj.default, aten._conj_copy.default, aten._conj_physical.default, torch.ops.prims.conj_physical.default)
def conj(self: Array) -> Array:
    return jnp.conj(self)


@lowering(aten._neg_view.default, aten._neg_view_copy.default)
def neg_view(self: Array) -> Array:
    return -self


@lowering(aten.complex.default)
def complex_(real: Array, imag: Array) -> Array:
    return lax.complex(*jnp.broadcast_arrays(real, imag))


@lowering(aten.polar.default)
def polar(abs: Array, angle: Array) -> Array:
    return complex_(abs * jnp.cos(angle), abs * jnp.sin(angle))


@lowering(aten.view_as_real.default, aten.view_as_real_copy.default)
def view_as_real(self: Array) -> Array:
    return jnp.stack([self.real, self.imag], axis=-1)


@lowering(aten.view_as_complex.default, aten.view_as_complex_copy.default)
def view_as_complex(self: Array) -> Array:
    return lax.complex(self[..., 0], self[..., 1])
