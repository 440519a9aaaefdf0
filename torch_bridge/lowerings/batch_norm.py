"""Batch norm in its several aten forms, and the pieces that `nn.SyncBatchNorm` is made of.

An aten form that updates the running statistics in place cannot do so here: in training with running statistics only the functional
forms, which return the new ones, are lowered, and the others raise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax import lax

from torch_bridge.ir import dtypes
from torch_bridge.lowerings._opmath import wide_dtype, widen
from torch_bridge.lowerings.normalization import mean_and_centred
from torch_bridge.lowerings.registry import lowering
from torch_bridge.lowerings.types import Array

aten = torch.ops.aten
OptArray = jax.Array | None


def _axes(x: jax.Array) -> tuple[int, ...]:
    """All dims but the channels, dim 1."""
    return (0, *range(2, x.ndim))


def _channels(v: jax.Array, x: jax.Array) -> jax.Array:
    return widen(v).reshape(1, -1, *[1] * (x.ndim - 2))


def _count(x: jax.Array) -> int:
    return x.size // x.shape[1] if x.shape[1] else 0


def _scale_shift(hat: jax.Array, weight: OptArray, bias: OptArray, x: jax.Array) -> jax.Array:
    hat = hat if weight is None else hat * _channels(weight, x)
    return (hat if bias is None else hat + _channels(bias, x)).astype(x.dtype)


def _updated(running: OptArray, new: jax.Array, momentum: float | dtypes.Scalar) -> OptArray:
    if running is None:
        return None
    share = dtypes.plain(momentum)
    new_share, old_share = (dtypes.cast(v, new.dtype) for v in (share, 1 - share))
    return (new_share * new + old_share * widen(running)).astype(running.dtype)


def _batch_norm(
    x: jax.Array,
    weight: jax.Array | None,
    bias: jax.Array | None,
    running_mean: jax.Array | None,
    running_var: jax.Array | None,
    training: bool,
    momentum: float | dtypes.Scalar,
    eps: float,
) -> tuple[Any, ...]:
    """Output, saved mean and inverse deviation (float32 for half precision, as in torch's meta kernels), new running mean and variance."""
    if not training:
        mean, invstd = widen(running_mean), lax.rsqrt(widen(running_var) + eps)
        hat = (widen(x) - _channels(mean, x)) * _channels(invstd, x)
        return _scale_shift(hat, weight, bias, x), mean, invstd, running_mean, running_var
    mean, var, centred = mean_and_centred(widen(x), _axes(x))
    invstd = lax.rsqrt(var + eps)
    out = _scale_shift(centred * invstd, weight, bias, x)
    n = _count(x)
    unbiased = var.reshape(-1) * (n / (n - 1) if n > 1 else math.nan)
    mean, invstd = mean.reshape(-1), invstd.reshape(-1)
    return out, mean, invstd, _updated(running_mean, mean, momentum), _updated(running_var, unbiased, momentum)


def _refuse_update(op: str, training: bool, running_mean: OptArray) -> None:
    if training and running_mean is not None:
        raise NotImplementedError(
            f"aten.{op} in training updates its running statistics in place, which a lowering cannot: "
            "record aten._native_batch_norm_legit_functional and write its last two results to the running statistics."
        )


@lowering(aten._native_batch_norm_legit_functional.default, once=True)
def batch_norm_functional(
    input: jax.Array,
    weight: jax.Array | None,
    bias: jax.Array | None,
    running_mean: jax.Array | None,
    running_var: jax.Array | None,
    training: bool,
    momentum: float | dtypes.Scalar,
    eps: float,
) -> tuple[Any, ...]:
    return _batch_norm(input, weight, bias, running_mean, running_var, training, momentum, eps)


@lowering(aten.native_batch_norm.default)
def native_batch_norm(
    input: jax.Array,
    weight: jax.Array | None,
    bias: jax.Array | None,
    running_mean: jax.Array | None,
    running_var: jax.Array | None,
    training: bool,
    momentum: float | dtypes.Scalar,
    eps: float,
) -> tuple[Any, ...]:
    _refuse_update("native_batch_norm", training, running_mean)
    return _batch_norm(input, weight, bias, running_mean, running_var, training, momentum, eps)[:3]


@lowering(aten._native_batch_norm_legit.default)
def native_batch_norm_legit(
    input: jax.Array,
    weight: jax.Array | None,
    bias: jax.Array | None,
    running_mean: jax.Array | None,
    running_var: jax.Array | None,
    training: bool,
    momentum: float | dtypes.Scalar,
    eps: float,
) -> tuple[Any, ...]:
    _refuse_update("_native_batch_norm_legit", training, running_mean)
    return _batch_norm(input, weight, bias, running_mean, running_var, training, momentum, eps)[:3]


@lowering(aten._native_batch_norm_legit.no_stats)
def native_batch_norm_no_stats(
    input: jax.Array, weight: jax.Array | None, bias: jax.Array | None, training: bool, momentum: float, eps: float
) -> tuple[Any, ...]:
    return _batch_norm(input, weight, bias, None, None, True, momentum, eps)[:3]


@lowering(aten._native_batch_norm_legit_no_training.default)
def native_batch_norm_no_training(
    input: jax.Array,
    weight: jax.Array | None,
    bias: jax.Array | None,
    running_mean: jax.Array | None,
    running_var: jax.Array | None,
    momentum: float | dtypes.Scalar,
    eps: float,
) -> tuple[Any, ...]:
    return _batch_norm(input, weight, bias, running_mean, running_var, False, momentum, eps)[:3]


@lowering(aten._batch_norm_with_update_functional.default)
def batch_norm_with_update_functional(
    input: jax.Array,
    weight: jax.Array | None,
    bias: jax.Array | None,
    running_mean: jax.Array | None,
    running_var: jax.Array | None,
    momentum: float | dtypes.Scalar,
    eps: float,
) -> tuple[Any, ...]:
    out, mean, invstd, new_mean, new_var = _batch_norm(input, weight, bias, running_mean, running_var, True, momentum, eps)
    return out, mean, invstd, jnp.zeros((0,), jnp.uint8), new_mean, new_var


@lowering(aten._batch_norm_no_update.default)
def batch_norm_no_update(
    input: jax.Array,
    weight: jax.Array | None,
    bias: jax.Array | None,
    running_mean: jax.Array | None,
    running_var: jax.Array | None,
    momentum: float | dtypes.Scalar,
    eps: float,
) -> tuple[Any, ...]:
    training = running_mean is None or running_var is None
    out = _batch_norm(input, weight, bias, running_mean, running_var, training, momentum, eps)
    return *out[:3], jnp.zeros((0,), jnp.uint8)


@lowering(aten.native_batch_norm_backward.default, once=True)
def native_batch_norm_backward(
    grad_out: jax.Array,
    input: jax.Array,
    weight: OptArray,
    running_mean: OptArray,
    running_var: OptArray,
    save_mean: OptArray,
    save_invstd: OptArray,
    train: bool,
    eps: float,
    output_mask: Sequence[bool],
) -> tuple[OptArray, ...]:
    g, x = widen(grad_out), widen(input)
    mean = widen(save_mean if train else running_mean)
    invstd = widen(save_invstd) if train else lax.rsqrt(widen(running_var) + eps)
    hat = (x - _channels(mean, x)) * _channels(invstd, x)
    sum_g, sum_g_hat = jnp.sum(g, axis=_axes(x)), jnp.sum(g * hat, axis=_axes(x))
    factor = invstd if weight is None else invstd * widen(weight)
    grad_input = g
    if train and _count(x):
        grad_input = g - (_channels(sum_g, x) + hat * _channels(sum_g_hat, x)) / _count(x)
    like = input if weight is None else weight
    return (
        (grad_input * _channels(factor, x)).astype(input.dtype) if output_mask[0] else None,
        sum_g_hat.astype(like.dtype) if output_mask[1] else None,
        sum_g.astype(like.dtype) if output_mask[2] else None,
    )


@lowering(aten.batch_norm_backward.default)
def batch_norm_backward(
    grad_out: Array,
    input: jax.Array,
    weight: jax.Array | None,
    running_mean: jax.Array | None,
    running_var: jax.Array | None,
    save_mean: jax.Array | None,
    save_var: jax.Array | None,
    update: bool,
    eps: float,
    output_mask: Sequence[bool],
    reserve: Array,
) -> tuple[Any, ...]:
    return native_batch_norm_backward(grad_out, input, weight, running_mean, running_var, save_mean, save_var, update, eps, output_mask)


@lowering(aten.batch_norm_stats.default)
def batch_norm_stats(input: jax.Array, eps: float) -> tuple[jax.Array, jax.Array]:
    """Mean and inverse deviation of each channel on this rank."""
    mean, var, _ = mean_and_centred(widen(input), _axes(input))
    return mean.reshape(-1), lax.rsqrt(var + eps).reshape(-1)


@lowering(aten.batch_norm_update_stats.default)
def batch_norm_update_stats(
    input: jax.Array, running_mean: jax.Array | None, running_var: jax.Array | None, momentum: float
) -> tuple[Any, ...]:
    """Mean and biased variance; the update of running statistics is refused."""
    _refuse_update("batch_norm_update_stats", True, running_mean)
    mean, var, _ = mean_and_centred(widen(input), _axes(input))
    return mean.reshape(-1).astype(input.dtype), var.reshape(-1).astype(input.dtype)


def gathered_stats(mean: jax.Array, invstd: jax.Array, counts: jax.Array, eps: float) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Mean, biased variance and number of elements of all ranks together, from their [ranks, C] statistics and [ranks] counts."""
    n = counts.astype(mean.dtype)[:, None]
    total = jnp.sum(n)
    joint = jnp.sum(mean * n, axis=0) / total
    var = 1 / (invstd * invstd) - eps + (mean - joint) ** 2
    return joint, jnp.sum(var * n, axis=0) / total, total


@lowering(aten.batch_norm_gather_stats_with_counts.default)
def batch_norm_gather_stats_with_counts(
    input: jax.Array,
    mean: jax.Array,
    invstd: jax.Array,
    running_mean: jax.Array | None,
    running_var: jax.Array | None,
    momentum: float | dtypes.Scalar,
    eps: float,
    counts: Array,
) -> tuple[Any, ...]:
    _refuse_update("batch_norm_gather_stats_with_counts", True, running_mean)
    joint, var, _ = gathered_stats(widen(mean), widen(invstd), counts, eps)
    return joint, lax.rsqrt(var + eps)


@lowering(aten.batch_norm_elemt.default)
def batch_norm_elemt(
    input: jax.Array, weight: jax.Array | None, bias: jax.Array | None, mean: jax.Array, invstd: jax.Array, eps: float
) -> jax.Array:
    hat = (widen(input) - _channels(mean, input)) * _channels(invstd, input)
    return _scale_shift(hat, weight, bias, input)


@lowering(aten.batch_norm_backward_reduce.default)
def batch_norm_backward_reduce(
    grad_out: jax.Array,
    input: jax.Array,
    mean: jax.Array,
    invstd: jax.Array,
    weight: OptArray,
    input_g: bool,
    weight_g: bool,
    bias_g: bool,
) -> tuple[OptArray, ...]:
    """sum(dy), sum(dy * (x - mean)), and from them this rank's gradients of weight and bias."""
    g = widen(grad_out)
    sum_dy = jnp.sum(g, axis=_axes(g))
    sum_dy_xmu = jnp.sum(g * (widen(input) - _channels(mean, input)), axis=_axes(g))
    like: Any = wide_dtype(input.dtype) if weight is None else weight.dtype
    return (
        sum_dy if input_g else None,
        sum_dy_xmu if input_g else None,
        (sum_dy_xmu * widen(invstd)).astype(like) if weight_g else None,
        sum_dy.astype(like) if bias_g else None,
    )


@lowering(aten.batch_norm_backward_elemt.default)
def batch_norm_backward_elemt(
    grad_out: jax.Array,
    input: jax.Array,
    mean: jax.Array,
    invstd: jax.Array,
    weight: OptArray,
    sum_dy: jax.Array,
    sum_dy_xmu: jax.Array,
    count: jax.Array,
) -> jax.Array:
    """Gradient of the input; sums and counts are those of all ranks."""
    total = jnp.sum(count).astype(wide_dtype(input.dtype))
    centred = widen(input) - _channels(mean, input)
    invstd = widen(invstd)
    grad = widen(grad_out) - _channels(sum_dy, input) / total
    grad = grad - centred * _channels(widen(sum_dy_xmu) * invstd * invstd, input) / total
    factor = invstd if weight is None else invstd * widen(weight)
    return (grad * _channels(factor, input)).astype(input.dtype)
