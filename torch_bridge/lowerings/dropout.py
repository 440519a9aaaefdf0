"""Dropout with the mask as a result, so that the backward op uses the same one."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from torch_bridge.ir import dtypes
from torch_bridge.lowerings import random_keys
from torch_bridge.lowerings._opmath import widen
from torch_bridge.lowerings.registry import lowering

aten = torch.ops.aten

_SHIFTS = (16, 15, 16)
_FACTORS = (0x7FEB352D, 0x846CA68B)
"""Of the hash `lowbias32`, which maps 32 bits to 32 bits one to one; each bit of its result depends on each of its argument."""


def keep_mask(key: jax.Array, p: float | dtypes.Scalar, shape: tuple[int, ...]) -> jax.Array:
    """A boolean mask that is True with probability `1 - p`, from 32 bits an element: a hash of the key and the element's number.

    Every element's bits are computed from its number alone, so XLA computes them where the mask is read, forward and backward, and keeps nothing. XLA's own
    generator (Philox) makes four words at a time, and on CPUs computes all four for each.
    """
    threshold: Any
    if isinstance(p, dtypes.Scalar):
        threshold = jnp.round(p.value * 2.0**32).astype(jnp.uint32)
    elif p >= 1:
        return jnp.zeros(shape, jnp.bool_)
    else:
        threshold = threshold_of(p)
    count = math.prod(shape)
    if count >= 2**32 or not random_keys.is_counted(key):
        return jax.random.bits(key, shape, jnp.uint32) >= threshold
    low, high, *_ = jax.random.key_data(key)
    return hashed(lax.iota(jnp.uint32, count).reshape(shape), low, high) >= threshold


def threshold_of(p: float) -> np.uint32:
    """What hashes are compared with, for a probability below 1."""
    return np.uint32(min(round(p * 2**32), 2**32 - 1))


def hashed(numbers: Any, low: Any, high: Any) -> Any:
    """The bits of elements, from their numbers and the two words of a key: uint32, of JAX or of numpy."""
    return _hash(_hash(numbers ^ low) + high)


def _hash(x: Any) -> Any:
    for shift, factor in zip(_SHIFTS, _FACTORS, strict=False):
        x = (x ^ (x >> np.uint32(shift))) * np.uint32(factor)
    return x ^ (x >> np.uint32(_SHIFTS[-1]))


def keep_scale(p: float) -> float:
    """What kept elements are multiplied by."""
    return 0.0 if p >= 1 else 1 / (1 - p)


@lowering(aten.native_dropout.default, rng=True, once=True)
def native_dropout(input: jax.Array, p: float | dtypes.Scalar, train: bool | None, *, key: jax.Array) -> tuple[jax.Array, jax.Array]:
    if train is False or (not isinstance(p, dtypes.Scalar) and p == 0):
        return input, jnp.ones(input.shape, jnp.bool_)
    scale = dtypes.Scalar(float, 1 / (1 - p.value)) if isinstance(p, dtypes.Scalar) else keep_scale(p)
    keep = keep_mask(key, p, input.shape)
    return native_dropout_backward(input, keep, scale), keep


@lowering(aten.native_dropout_backward.default)
def native_dropout_backward(grad_output: jax.Array, mask: jax.Array, scale: float | dtypes.Scalar) -> jax.Array:
    """`grad * mask * scale`: a product, as in torch, so that NaN and inf in dropped places stay NaN."""
    g = widen(grad_output)
    return (g * dtypes.cast(mask, g.dtype) * dtypes.cast(scale, g.dtype)).astype(grad_output.dtype)
