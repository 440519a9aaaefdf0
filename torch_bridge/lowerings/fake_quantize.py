"""Rounding to a grid of integers and back, as training for quantization does. The gradient goes through unchanged where nothing was cut off."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import torch
from jax import lax

from torch_bridge.ir import dtypes
from torch_bridge.lowerings.precision import widen
from torch_bridge.lowerings.registry import lowering
from torch_bridge.lowerings.types import Array, Operand

aten = torch.ops.aten


@jax.custom_jvp
def _straight_through(x: Array, rounded: Array, inside: Array) -> Array:
    return rounded


@_straight_through.defjvp
def _straight_through_jvp(values: tuple[Array, ...], changes: tuple[Array, ...]) -> tuple[Array, Array]:
    _, rounded, inside = values
    return rounded, jnp.where(inside, changes[0], jnp.zeros_like(changes[0]))


def _fake_quantize(self: Array, scale: Operand, zero_point: Operand, quant_min: int, quant_max: int) -> tuple[Array, Array]:
    """The values on the grid, and which of them lie in its range. A zero point that is a float is added before rounding. NaN is below the range."""
    x = widen(self)
    scale = dtypes.cast(scale, jnp.float32)
    zero = zero_point if isinstance(zero_point, int) else jnp.asarray(zero_point).astype(x.dtype)
    scaled = x * (1 / scale).astype(x.dtype)
    before = isinstance(zero_point, jax.Array) and jnp.issubdtype(zero_point.dtype, jnp.floating)
    place = jnp.round(scaled + zero) if before else jnp.round(scaled) + zero
    place = lax.stop_gradient(jnp.where(jnp.isnan(place), -jnp.inf, place))
    inside = (place >= quant_min) & (place <= quant_max)
    rounded = (jnp.clip(place, quant_min, quant_max) - zero) * scale.astype(x.dtype)
    return _straight_through(self, rounded.astype(self.dtype), inside), inside


@lowering(aten.fake_quantize_per_tensor_affine_cachemask.default, floats=("scale",))
def fake_quantize_per_tensor(self: Array, scale: Operand, zero_point: int, quant_min: int, quant_max: int) -> tuple[Array, Array]:
    return _fake_quantize(self, scale, zero_point, quant_min, quant_max)


@lowering(aten._fake_quantize_per_tensor_affine_cachemask_tensor_qparams.default)
def fake_quantize_by_tensors(
    self: Array, scale: Array, zero_point: Array, fake_quant_enabled: Array, quant_min: int, quant_max: int
) -> tuple[Array, Array]:
    zero = dtypes.cast(zero_point.reshape(-1)[0], jnp.int32)  # torch truncates one that is a float
    rounded, inside = _fake_quantize(self, scale.reshape(-1)[0], zero, quant_min, quant_max)
    on = fake_quant_enabled.reshape(-1)[0] != 0
    return jnp.where(on, rounded, self), inside | ~on


@lowering(aten.fake_quantize_per_channel_affine_cachemask.default)
def fake_quantize_per_channel(
    self: Array, scale: Array, zero_point: Array, axis: int, quant_min: int, quant_max: int
) -> tuple[Array, Array]:
    shape = [-1 if d == axis % self.ndim else 1 for d in range(self.ndim)]
    return _fake_quantize(self, scale.reshape(shape), zero_point.reshape(shape), quant_min, quant_max)
