"""Loss functions and their backward ops. `reduction`: 0 none, 1 mean, 2 sum."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax import lax

from torch_bridge.ir import dtypes
from torch_bridge.lowerings._opmath import pointwise, widen
from torch_bridge.lowerings.activations import log_sigmoid
from torch_bridge.lowerings.registry import lowering
from torch_bridge.lowerings.types import DType, Scalar

aten = torch.ops.aten


def reduced(x: jax.Array, reduction: int) -> jax.Array:
    if reduction == 0:
        return x
    total = jnp.sum(x, dtype=x.dtype)
    return total / x.size if reduction == 1 else total


def _share(grad: jax.Array, reduction: int, count: int) -> jax.Array:
    """The gradient that reaches one element's loss."""
    return grad / count if reduction == 1 else grad


def _backward(derivative: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """From `d loss / d self` per element to the aten backward op (grad_output, self, target, reduction, ...)."""

    @functools.wraps(derivative)
    def run(grad_output: jax.Array, self: jax.Array, target: jax.Array, reduction: int, *rest: float) -> jax.Array:
        count = math.prod(jnp.broadcast_shapes(self.shape, target.shape))
        return derivative(self, target, *rest) * _share(grad_output, reduction, count)

    return pointwise(run)


@lowering(aten.mse_loss.default)
@pointwise
def mse_loss(self: jax.Array, target: jax.Array, reduction: int = 1) -> jax.Array:
    diff = self - target
    return reduced(diff * diff, reduction)


@lowering(aten.mse_loss_backward.default)
@_backward
def mse_loss_backward(self: jax.Array, target: jax.Array) -> jax.Array:
    return 2 * (self - target)


@lowering(aten.smooth_l1_loss.default)
@pointwise
def smooth_l1_loss(self: jax.Array, target: jax.Array, reduction: int = 1, beta: float = 1.0) -> jax.Array:
    diff = self - target
    z = jnp.where(diff > 0, diff, -diff)  # with beta 0, torch's derivative at 0 is -1
    return reduced(z if beta == 0 else jnp.where(z < beta, 0.5 * z * z / beta, z - 0.5 * beta), reduction)


@lowering(aten.smooth_l1_loss_backward.default)
@_backward
def smooth_l1_loss_backward(self: jax.Array, target: jax.Array, beta: float) -> jax.Array:
    diff = self - target
    return jnp.where(diff <= -beta, -1, jnp.where(diff >= beta, 1, diff / beta if beta else diff))


def _in_own_dtype(loss: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """For losses that torch writes in the dtype of the input, whatever the target's is."""

    @functools.wraps(loss)
    def run(self: jax.Array, *args: Any, **kwargs: Any) -> jax.Array:
        return loss(self, *args, **kwargs).astype(self.dtype)

    return run


@lowering(aten.huber_loss.default)
@_in_own_dtype
@pointwise
def huber_loss(self: jax.Array, target: jax.Array, reduction: int = 1, delta: float = 1.0) -> jax.Array:
    z = jnp.abs(self - target)
    return reduced(jnp.where(z <= delta, 0.5 * z * z, delta * (z - 0.5 * delta)), reduction)


@lowering(aten.huber_loss_backward.default)
@_backward
def huber_loss_backward(self: jax.Array, target: jax.Array, delta: float) -> jax.Array:
    diff = self - target
    return jnp.where(diff <= -delta, -delta, jnp.where(diff >= delta, delta, diff))


@lowering(aten.soft_margin_loss.default)
@_in_own_dtype
@pointwise
def soft_margin_loss(self: jax.Array, target: jax.Array, reduction: int = 1) -> jax.Array:
    return reduced(jnp.log1p(jnp.exp(-target * self)), reduction)


@lowering(aten.soft_margin_loss_backward.default)
@_backward
def soft_margin_loss_backward(self: jax.Array, target: jax.Array) -> jax.Array:
    return -target * lax.logistic(-target * self)


def _weighted(x: jax.Array, weight: jax.Array | None) -> jax.Array:
    return x if weight is None else x * weight


@lowering(aten.binary_cross_entropy.default)
@pointwise
def binary_cross_entropy(self: jax.Array, target: jax.Array, weight: jax.Array | None = None, reduction: int = 1) -> jax.Array:
    """Logarithms are cut at -100, as in torch, so that the loss stays finite at 0 and 1."""
    loss = (target - 1) * jnp.maximum(jnp.log1p(-self), -100) - target * jnp.maximum(jnp.log(self), -100)
    return reduced(_weighted(loss, weight), reduction)


@lowering(aten.binary_cross_entropy_backward.default)
@pointwise
def binary_cross_entropy_backward(
    grad_output: jax.Array, self: jax.Array, target: jax.Array, weight: jax.Array | None = None, reduction: int = 1
) -> jax.Array:
    slope = (self - target) / jnp.maximum((1 - self) * self, 1e-12)
    return _weighted(_share(grad_output, reduction, self.size) * slope, weight)


@lowering(aten.binary_cross_entropy_with_logits.default)
@pointwise
def binary_cross_entropy_with_logits(
    self: jax.Array, target: jax.Array, weight: jax.Array | None = None, pos_weight: jax.Array | None = None, reduction: int = 1
) -> jax.Array:
    """-(pos_weight * t * log s(x) + (1 - t) * log(1 - s(x))), with log s(x) = -softplus(-x)."""
    factor = 1 if pos_weight is None else 1 + (pos_weight - 1) * target
    return reduced(_weighted((1 - target) * self - factor * log_sigmoid(self), weight), reduction)


# --- negative log likelihood -----------------------------------------------------------------------------------------------------


def _class_numbers(target: jax.Array) -> jax.Array:
    """uint8 has no room for -100, the number of what is ignored."""
    return target.astype(jnp.int32) if target.dtype == jnp.uint8 else target


def _target_weights(target: jax.Array, weight: jax.Array | None, ignore_index: int, dtype: DType) -> jax.Array:
    """Per target its class weight, 0 where ignored."""
    seen = target != ignore_index
    if weight is None:
        return seen.astype(dtype)
    return jnp.where(seen, widen(weight)[jnp.where(seen, target, 0)].astype(dtype), 0)


def _picked(x: jax.Array, target: jax.Array, ignore_index: int, axis: int) -> jax.Array:
    """x at the target class, 0 where ignored, and NaN where the class does not exist (torch stops there)."""
    classes = x.shape[axis]
    index = jnp.where(target == ignore_index, 0, jnp.where(target < 0, classes, target))
    picked = jnp.take_along_axis(x, jnp.expand_dims(index, axis), axis=axis, mode="fill", fill_value=jnp.nan)
    return jnp.where(target == ignore_index, 0, jnp.squeeze(picked, axis))


def _nll_forward(
    self: jax.Array, target: jax.Array, weight: jax.Array | None, reduction: int, ignore_index: int
) -> tuple[jax.Array, jax.Array]:
    axis, target = 1 if self.ndim > 1 else 0, _class_numbers(target)
    x = widen(self)
    if x.shape[axis] == 0 or target.size == 0:
        loss = w = jnp.zeros(target.shape, x.dtype)
    else:
        w = _target_weights(target, weight, ignore_index, x.dtype)
        loss = jnp.where(target == ignore_index, 0, -_picked(x, target, ignore_index, axis) * w)
    if reduction == 0 and self.ndim > 1:
        return loss.astype(self.dtype), jnp.zeros((), self.dtype)
    total_weight = jnp.sum(w)
    total = jnp.sum(loss)
    return (total / total_weight if reduction == 1 else total).astype(self.dtype), total_weight.astype(self.dtype)


def _nll_backward(
    grad_output: jax.Array,
    self: jax.Array,
    target: jax.Array,
    weight: jax.Array | None,
    reduction: int,
    ignore_index: int,
    total_weight: jax.Array,
) -> jax.Array:
    """A comparison with the class number instead of a scatter: XLA fuses it into what follows (log_softmax's backward)."""
    axis, target = 1 if self.ndim > 1 else 0, _class_numbers(target)
    g = widen(grad_output)
    w = _target_weights(target, weight, ignore_index, g.dtype)
    g = -g * w if reduction != 1 else -g * w / widen(total_weight)
    here = lax.broadcasted_iota(target.dtype, self.shape, axis) == jnp.expand_dims(target, axis)
    here = here & (jnp.expand_dims(target, axis) != ignore_index)
    return jnp.where(here, jnp.expand_dims(g, axis), 0).astype(self.dtype)


@lowering(aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)
def nll_loss_forward(
    self: jax.Array, target: jax.Array, weight: jax.Array | None, reduction: int, ignore_index: int
) -> tuple[jax.Array, jax.Array]:
    return _nll_forward(self, target, weight, reduction, ignore_index)


@lowering(aten.nll_loss_backward.default, aten.nll_loss2d_backward.default)
def nll_loss_backward(
    grad_output: jax.Array,
    self: jax.Array,
    target: jax.Array,
    weight: jax.Array | None,
    reduction: int,
    ignore_index: int,
    total_weight: jax.Array,
) -> jax.Array:
    return _nll_backward(grad_output, self, target, weight, reduction, ignore_index, total_weight)


# --- margins ---------------------------------------------------------------------------------------------------------------------


def _class_margins(x: jax.Array, target: jax.Array, margin: Scalar, weight: jax.Array | None) -> tuple[jax.Array, jax.Array, jax.Array]:
    """margin - x[target] + x of every class but the target, its class number as mask, and the weight of each row."""
    rows = x.reshape(-1, x.shape[-1]) if x.ndim else x.reshape(1, 1)
    t = target.reshape(-1, 1)
    other = lax.broadcasted_iota(t.dtype, rows.shape, 1) != t
    z = dtypes.cast(margin, rows.dtype) - jnp.take_along_axis(rows, t, axis=1) + rows
    w = jnp.ones_like(t, rows.dtype) if weight is None else weight[t]
    return z, other & (z > 0), w


def _multi_margin(self: jax.Array, target: jax.Array, p: Scalar, margin: Scalar, weight: jax.Array | None, reduction: int) -> jax.Array:
    z, active, w = _class_margins(self, target, margin, weight)
    loss = jnp.where(active, w * (z if p == 1 else z * z), 0).sum(axis=1) / z.shape[1]
    return reduced(loss.reshape(target.shape if self.ndim > 1 else ()), reduction)


@lowering(aten.multi_margin_loss.default, lift=False)
def multi_margin_loss(
    self: jax.Array, target: jax.Array, p: Scalar = 1, margin: Scalar = 1, weight: jax.Array | None = None, reduction: int = 1
) -> jax.Array:
    x = widen(self)
    return _multi_margin(x, target, p, margin, widen(weight), reduction).astype(self.dtype)


@lowering(aten.multi_margin_loss_backward.default, lift=False)
def multi_margin_loss_backward(
    grad_output: jax.Array,
    self: jax.Array,
    target: jax.Array,
    p: Scalar,
    margin: Scalar,
    weight: jax.Array | None = None,
    reduction: int = 1,
) -> jax.Array:
    _, vjp = jax.vjp(lambda x: _multi_margin(x, target, p, margin, widen(weight), reduction), widen(self))
    return vjp(widen(grad_output))[0].astype(self.dtype)


def _multilabel_targets(target: jax.Array, classes: int) -> tuple[jax.Array, jax.Array]:
    """Targets up to the first -1 count. Returns which entries count, and per class whether it is a target."""
    counts = jnp.cumsum(target < 0, axis=1) == 0
    hit = (target[:, :, None] == jnp.arange(classes)) & counts[:, :, None]
    return counts, hit.any(axis=1)


def _multilabel_margin(x: jax.Array, target: jax.Array, reduction: int) -> tuple[jax.Array, jax.Array]:
    rows, t = x.reshape(-1, x.shape[-1]), target.reshape(-1, target.shape[-1])
    counts, is_target = _multilabel_targets(t, rows.shape[1])
    at_target = jnp.take_along_axis(rows, jnp.where(counts, t, 0), axis=1)
    z = 1 - at_target[:, :, None] + rows[:, None, :]
    active = counts[:, :, None] & ~is_target[:, None, :] & (z > 0)
    loss = jnp.where(active, z, 0).sum(axis=(1, 2)) / rows.shape[1]
    return reduced(loss if x.ndim > 1 else loss[0], reduction), is_target


@lowering(aten.multilabel_margin_loss_forward.default)
def multilabel_margin_loss_forward(self: jax.Array, target: jax.Array, reduction: int) -> tuple[jax.Array, jax.Array]:
    x, t = jnp.atleast_1d(widen(self)), jnp.atleast_1d(target)
    loss, is_target = _multilabel_margin(x, t, reduction)
    return loss.astype(self.dtype), is_target.reshape(target.shape).astype(self.dtype)


@lowering(aten.multilabel_margin_loss_backward.default)
def multilabel_margin_loss_backward(
    grad_output: jax.Array, self: jax.Array, target: jax.Array, reduction: int, is_target: jax.Array
) -> jax.Array:
    x, t = jnp.atleast_1d(widen(self)), jnp.atleast_1d(target)
    _, vjp = jax.vjp(lambda x: _multilabel_margin(x, t, reduction)[0], x)
    return vjp(widen(grad_output))[0].reshape(self.shape).astype(self.dtype)
