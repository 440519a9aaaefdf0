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


# -- an observer and its rounding as one op (training for quantization) ----------------------------


@lowering(aten._fused_moving_avg_obs_fq_helper_functional.default, lift=False)
def observe_and_fake_quantize(
    self: Array,
    observer_on: Array,
    fake_quant_on: Array,
    running_min: Array,
    running_max: Array,
    scale: Array,
    zero_point: Array,
    averaging_const: float,
    quant_min: int,
    quant_max: int,
    ch_axis: int,
    per_row_fake_quant: bool = False,
    symmetric_quant: bool = False,
) -> tuple[Array, ...]:
    """The rounded values, where they were not cut off, and the new running minimum and maximum, scale and zero point: one of each, or one for each channel."""
    seen = lax.stop_gradient(self)
    others = tuple(d for d in range(self.ndim) if d != ch_axis) if per_row_fake_quant else None
    observed, rounding = (flag.reshape(-1)[0] != 0 for flag in (observer_on, fake_quant_on))
    low = jnp.where(observed, _averaged(running_min, jnp.min(seen, others), averaging_const), running_min)
    high = jnp.where(observed, _averaged(running_max, jnp.max(seen, others), averaging_const), running_max)
    step, zero = _grid(low.astype(jnp.float32), high.astype(jnp.float32), quant_min, quant_max, symmetric_quant)
    step = jnp.where(rounding, step.reshape(scale.shape).astype(scale.dtype), scale)
    zero = jnp.where(rounding, zero.reshape(zero_point.shape).astype(zero_point.dtype), zero_point)
    shape = [-1 if d == ch_axis else 1 for d in range(self.ndim)] if per_row_fake_quant else [1] * self.ndim
    rounded, inside = _fake_quantize(self, step.reshape(shape), zero.reshape(shape), quant_min, quant_max)
    return jnp.where(rounding, rounded, self), inside | ~rounding, low, high, step, zero


def _averaged(running: Array, now: Array, weight: float) -> Array:
    """A moving average, which begins with the first value."""
    now = now.reshape(running.shape).astype(running.dtype)
    return jnp.where(jnp.isinf(running), now, running + jnp.asarray(weight, running.dtype) * (now - running))


_SMALLEST_SCALE = 6.1e-5


def _grid(low: Array, high: Array, quant_min: int, quant_max: int, symmetric: bool) -> tuple[Array, Array]:
    """The scale and the zero point of a grid of integers that covers `low` to `high` and has 0 on it, as torch chooses them. symmetric: around 0, if it lies
    between the two."""
    middle = (low < 0) & (high > 0) & symmetric
    half = (quant_max - quant_min) // 2
    reach = jnp.maximum(jnp.abs(low / jnp.float32(-half - 1)), jnp.abs(high / jnp.float32(half))).astype(jnp.float64)
    low = jnp.where(middle, (reach * (-half - 1)).astype(jnp.float32), jnp.minimum(low, 0))
    high = jnp.where(middle, (reach * half).astype(jnp.float32), jnp.maximum(high, 0))
    scale = (high.astype(jnp.float64) - low) / (quant_max - quant_min)
    single = scale.astype(jnp.float32)
    scale = jnp.where((single == 0) | jnp.isinf(1 / single), 0.1, scale)
    small = scale < jnp.float32(_SMALLEST_SCALE)
    more = jnp.float32(_SMALLEST_SCALE) / scale.astype(jnp.float32)
    widest = jnp.float32(_SMALLEST_SCALE) * (quant_max - quant_min)
    low, high = (
        jnp.where(small, jnp.where(low == 0, 0, jnp.where(high == 0, -widest, low * more)), low),
        jnp.where(small, jnp.where(low == 0, widest, jnp.where(high == 0, 0, high * more)), high),
    )
    scale = jnp.where(small, jnp.float64(jnp.float32(_SMALLEST_SCALE)), scale)
    below, above = low / scale, high / scale
    by_low = abs(quant_min) - jnp.abs(below) < abs(quant_max) - jnp.abs(above)
    zero = jnp.where(middle, (quant_min + quant_max) / 2, jnp.where(by_low, quant_min - below, quant_max - above))
    return scale.astype(jnp.float32), jnp.clip(jnp.round(zero), quant_min, quant_max).astype(jnp.int32)
