"""Activation functions and their backward ops.

Each `*_backward` is torch's closed formula, so that the values at kinks (0, bounds) are torch's. The forward functions are written
so that `jax.grad` gives the same: a branch that is not taken never sees a value that overflows.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import torch
from jax import lax

from torch_bridge.ir import dtypes
from torch_bridge.lowerings._opmath import pointwise
from torch_bridge.lowerings.registry import lowering
from torch_bridge.lowerings.types import Scalar

aten = torch.ops.aten

_SQRT_HALF = math.sqrt(0.5)
_INV_SQRT_2PI = 1 / math.sqrt(2 * math.pi)
_SQRT_2_OVER_PI = math.sqrt(2 / math.pi)


def _as(number: Scalar, x: jax.Array) -> jax.Array:
    """A schema Scalar in the dtype of `x`."""
    return dtypes.cast(number, x.dtype)


@lowering(aten.relu.default)
def relu(self: jax.Array) -> jax.Array:
    return jnp.where(self <= 0, jnp.zeros_like(self), self)


@lowering(aten.threshold.default)
@pointwise
def threshold(self: jax.Array, threshold: Scalar, value: Scalar) -> jax.Array:
    return jnp.where(self <= _as(threshold, self), _as(value, self), self)


@lowering(aten.threshold_backward.default)
@pointwise
def threshold_backward(grad_output: jax.Array, self: jax.Array, threshold: Scalar) -> jax.Array:
    return jnp.where(self <= _as(threshold, self), 0, grad_output)


@lowering(aten.leaky_relu.default)
@pointwise
def leaky_relu(self: jax.Array, negative_slope: Scalar = 0.01) -> jax.Array:
    return jnp.where(self > 0, self, self * _as(negative_slope, self))


@lowering(aten.leaky_relu_backward.default)
@pointwise
def leaky_relu_backward(grad_output: jax.Array, self: jax.Array, negative_slope: Scalar, self_is_result: bool) -> jax.Array:
    return jnp.where(self > 0, grad_output, grad_output * _as(negative_slope, self))


@lowering(aten.rrelu_with_noise_backward.default, lift=False)
@pointwise
def rrelu_with_noise_backward(
    grad_output: jax.Array, self: jax.Array, noise: jax.Array, lower: float, upper: float, training: bool, self_is_result: bool
) -> jax.Array:
    if training and upper - lower > 1e-6:
        return grad_output * noise
    return jnp.where(self > 0, grad_output, grad_output * ((lower + upper) / 2))


@lowering(aten._prelu_kernel.default)
@pointwise
def prelu(self: jax.Array, weight: jax.Array) -> jax.Array:
    return jnp.where(self > 0, self, weight * self)


@lowering(aten._prelu_kernel_backward.default)
@pointwise
def prelu_backward(grad_output: jax.Array, self: jax.Array, weight: jax.Array) -> tuple[jax.Array, jax.Array]:
    positive = self > 0
    return jnp.where(positive, grad_output, weight * grad_output), jnp.where(positive, 0, self * grad_output)


@lowering(aten.hardtanh.default)
@pointwise
def hardtanh(self: jax.Array, min_val: Scalar = -1, max_val: Scalar = 1) -> jax.Array:
    low, high = _as(min_val, self), _as(max_val, self)
    return jnp.where(self >= high, high, jnp.where(self <= low, low, self))


@lowering(aten.hardtanh_backward.default)
@pointwise
def hardtanh_backward(grad_output: jax.Array, self: jax.Array, min_val: Scalar, max_val: Scalar) -> jax.Array:
    return jnp.where((self <= _as(min_val, self)) | (self >= _as(max_val, self)), 0, grad_output)


@lowering(aten.hardsigmoid.default)
@pointwise
def hardsigmoid(self: jax.Array) -> jax.Array:
    return jnp.where(self <= -3, 0, jnp.where(self >= 3, 1, (self + 3) / 6))


@lowering(aten.hardsigmoid_backward.default)
@pointwise
def hardsigmoid_backward(grad_output: jax.Array, self: jax.Array) -> jax.Array:
    return jnp.where((self > -3) & (self < 3), grad_output / 6, 0)


@lowering(aten.hardswish.default)
@pointwise
def hardswish(self: jax.Array) -> jax.Array:
    inside = jnp.where(jnp.abs(self) < 3, self, 0)
    return jnp.where(self <= -3, self * 0, jnp.where(self >= 3, self, jnp.where(jnp.isnan(self), self, inside * (inside + 3) / 6)))


@lowering(aten.hardswish_backward.default)
@pointwise
def hardswish_backward(grad_output: jax.Array, self: jax.Array) -> jax.Array:
    return jnp.where(self <= -3, 0, jnp.where(self < 3, grad_output * (self / 3 + 0.5), grad_output))


@lowering(aten.hardshrink.default)
@pointwise
def hardshrink(self: jax.Array, lambd: Scalar = 0.5) -> jax.Array:
    bound = _as(lambd, self)
    return jnp.where((self >= -bound) & (self <= bound), 0, self)


@lowering(aten.hardshrink_backward.default, aten.softshrink_backward.default)
@pointwise
def shrink_backward(grad_output: jax.Array, self: jax.Array, lambd: Scalar) -> jax.Array:
    bound = _as(lambd, self)
    return jnp.where((self >= -bound) & (self <= bound), 0, grad_output)


@lowering(aten.softshrink.default)
@pointwise
def softshrink(self: jax.Array, lambd: Scalar = 0.5) -> jax.Array:
    bound = _as(lambd, self)
    return jnp.where(self > bound, self - bound, jnp.where(self < -bound, self + bound, self * 0))


@lowering(aten.elu.default)
@pointwise
def elu(self: jax.Array, alpha: Scalar = 1, scale: Scalar = 1, input_scale: Scalar = 1) -> jax.Array:
    negative = jnp.where(self <= 0, self, 0)
    below = jnp.expm1(negative * _as(input_scale, self)) * (_as(alpha, self) * _as(scale, self))
    return jnp.where(self <= 0, below, self * _as(scale, self))


@lowering(aten.celu.default)
def celu(self: jax.Array, alpha: Scalar = 1.0) -> jax.Array:
    wide = dtypes.cast(alpha, jnp.float64)
    return elu(self, dtypes.Scalar(float, wide), 1, dtypes.Scalar(float, 1 / wide))


@lowering(aten.elu_backward.default)
@pointwise
def elu_backward(
    grad_output: jax.Array, alpha: Scalar, scale: Scalar, input_scale: Scalar, is_result: bool, self_or_result: jax.Array
) -> jax.Array:
    x = self_or_result
    poscoef, negiptcoef = _as(scale, x), _as(input_scale, x)
    negcoef = _as(alpha, x) * poscoef
    below = (x + negcoef) if is_result else negcoef * jnp.exp(x * negiptcoef)
    return jnp.where(x <= 0, grad_output * negiptcoef * below, grad_output * poscoef)


@lowering(aten.softplus.default)
@pointwise
def softplus(self: jax.Array, beta: Scalar = 1, threshold: Scalar = 20) -> jax.Array:
    b = _as(beta, self)
    linear = self * b > _as(threshold, self)
    return jnp.where(linear, self, jnp.log1p(jnp.exp(jnp.where(linear, 0, self * b))) / b)


@lowering(aten.softplus_backward.default)
@pointwise
def softplus_backward(grad_output: jax.Array, self: jax.Array, beta: Scalar, threshold: Scalar) -> jax.Array:
    b = _as(beta, self)
    linear = self * b > _as(threshold, self)
    z = jnp.exp(jnp.where(linear, 0, self * b))
    return jnp.where(linear, grad_output, grad_output * z / (z + 1))


@lowering(aten.gelu.default)
@pointwise
def gelu(self: jax.Array, approximate: str = "none") -> jax.Array:
    if approximate == "tanh":
        return 0.5 * self * (1 + jnp.tanh(_SQRT_2_OVER_PI * (self + 0.044715 * self * self * self)))
    return self * 0.5 * (1 + lax.erf(self * _SQRT_HALF))


@lowering(aten.gelu_backward.default)
@pointwise
def gelu_backward(grad_output: jax.Array, self: jax.Array, approximate: str = "none") -> jax.Array:
    x = self
    if approximate == "tanh":
        t = jnp.tanh(_SQRT_2_OVER_PI * (x + 0.044715 * x * x * x))
        inner = _SQRT_2_OVER_PI * (1 + 3 * 0.044715 * x * x)
        return grad_output * (0.5 * (1 + t) + 0.5 * x * (1 - t * t) * inner)
    cdf = 0.5 * (1 + lax.erf(x * _SQRT_HALF))
    return grad_output * (cdf + x * jnp.exp(-0.5 * x * x) * _INV_SQRT_2PI)


@lowering(aten.silu.default)
@pointwise
def silu(self: jax.Array) -> jax.Array:
    return self * lax.logistic(self)


@lowering(aten.silu_backward.default)
@pointwise
def silu_backward(grad_output: jax.Array, self: jax.Array) -> jax.Array:
    s = lax.logistic(self)
    return grad_output * s * (1 + self * (1 - s))


def log_sigmoid(x: jax.Array) -> jax.Array:
    """min(x, 0) - log1p(exp(-|x|)), both parts branching alike so that the derivative at 0 is 1/2."""
    positive = x >= 0
    return jnp.where(positive, 0, x) - jnp.log1p(jnp.exp(jnp.where(positive, -x, x)))


def softplus_of(x: jax.Array) -> jax.Array:
    """log(1 + exp(x)) without overflow."""
    positive = x >= 0
    return jnp.where(positive, x, 0) + jnp.log1p(jnp.exp(jnp.where(positive, -x, x)))


@lowering(aten.mish.default)
@pointwise
def mish(self: jax.Array) -> jax.Array:
    return self * jnp.tanh(softplus_of(self))


@lowering(aten.mish_backward.default)
@pointwise
def mish_backward(grad_output: jax.Array, self: jax.Array) -> jax.Array:
    t = jnp.tanh(softplus_of(self))
    return grad_output * (t + self * lax.logistic(self) * (1 - t * t))


def _halves(x: jax.Array, dim: int) -> tuple[jax.Array, jax.Array]:
    dim = dim % x.ndim
    n = x.shape[dim] // 2
    return lax.slice_in_dim(x, 0, n, axis=dim), lax.slice_in_dim(x, n, 2 * n, axis=dim)


@lowering(aten.glu.default)
@pointwise
def glu(self: jax.Array, dim: int = -1) -> jax.Array:
    a, b = _halves(self, dim)
    return a * lax.logistic(b)


@lowering(aten.glu_backward.default)
@pointwise
def glu_backward(grad_output: jax.Array, self: jax.Array, dim: int) -> jax.Array:
    a, b = _halves(self, dim)
    s = lax.logistic(b)
    return jnp.concatenate([grad_output * s, grad_output * a * s * (1 - s)], axis=dim)


@lowering(aten.log_sigmoid_forward.default)
@pointwise
def log_sigmoid_forward(self: jax.Array) -> tuple[jax.Array, jax.Array]:
    """torch's CPU kernel also returns exp(-|x|) for the backward."""
    return log_sigmoid(self), jnp.exp(-jnp.abs(self))


@lowering(aten.log_sigmoid_backward.default)
@pointwise
def log_sigmoid_backward(grad_output: jax.Array, self: jax.Array, buffer: jax.Array) -> jax.Array:
    """d/dx log(sigmoid(x)) = sigmoid(-x). The buffer, which some devices leave empty, is not needed."""
    return grad_output * lax.logistic(-self)


@lowering(aten.logit.default)
def logit(self: jax.Array, eps: float | None = None) -> jax.Array:
    (x,) = dtypes.floating(self)
    return _logit(x, eps)


@pointwise
def _logit(x: jax.Array, eps: float) -> jax.Array:
    if eps is not None:
        x = jnp.where(x < eps, eps, jnp.where(x > 1 - eps, 1 - eps, x))
    return jnp.log(x / (1 - x))


@lowering(aten.logit_backward.default)
@pointwise
def logit_backward(grad_output: jax.Array, self: jax.Array, eps: float | None = None) -> jax.Array:
    low, high, outside = (0.0, 1.0, jnp.nan) if eps is None or eps < 0 else (eps, 1 - eps, 0.0)
    return jnp.where((self < low) | (self > high), outside, grad_output / (self * (1 - self)))


@lowering(aten.sigmoid_backward.default)
@pointwise
def sigmoid_backward(grad_output: jax.Array, output: jax.Array) -> jax.Array:
    return grad_output * jnp.conj((1 - output) * output)


@lowering(aten.tanh_backward.default)
@pointwise
def tanh_backward(grad_output: jax.Array, output: jax.Array) -> jax.Array:
    return grad_output * jnp.conj(1 - output * output)
