"""Dropout with the mask as a result, so that the backward op uses the same one."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import torch
from jax import lax

from torch_bridge.ir import dtypes
from torch_bridge.lowerings import random_keys
from torch_bridge.lowerings._opmath import widen
from torch_bridge.lowerings.registry import lowering

aten = torch.ops.aten

LEAST_IN_PARTS = 1 << 12
PARTS = 4
"""On CPUs a mask of at least so many elements is drawn in so many parts, in a loop: XLA would keep the bits (four bytes an element) for the backward pass
otherwise, since it compares them again in each program part that reads the mask."""


def keep_mask(key: jax.Array, p: float, shape: tuple[int, ...]) -> jax.Array:
    """A boolean mask that is True with probability `1 - p`, from 32 random bits an element."""
    if p >= 1:
        return jnp.zeros(shape, jnp.bool_)
    threshold = jnp.uint32(min(round(p * 2**32), 2**32 - 1))

    def at_once(key: jax.Array) -> jax.Array:
        return jax.random.bits(key, shape, jnp.uint32) >= threshold

    count = math.prod(shape)
    if count < LEAST_IN_PARTS or not random_keys.is_counted(key):
        return at_once(key)
    part = -(-count // PARTS // 4) * 4

    def in_parts(key: jax.Array) -> jax.Array:
        def draw(k: jax.Array, mask: jax.Array) -> jax.Array:
            bits = jax.random.bits(random_keys.later(key, k.astype(jnp.uint64) * part), (part,), jnp.uint32)
            return lax.dynamic_update_index_in_dim(mask, bits >= threshold, k, 0)

        mask = lax.fori_loop(0, PARTS, draw, jnp.zeros((PARTS, part), jnp.bool_))
        return mask.reshape(-1)[:count].reshape(shape)

    return lax.platform_dependent(key, cpu=in_parts, default=at_once)


def keep_scale(p: float) -> float:
    """What kept elements are multiplied by."""
    return 0.0 if p >= 1 else 1 / (1 - p)


@lowering(aten.native_dropout.default, rng=True)
def native_dropout(input: jax.Array, p: float, train: bool | None, *, key: jax.Array) -> tuple[jax.Array, jax.Array]:
    if train is False or p == 0:
        return input, jnp.ones(input.shape, jnp.bool_)
    keep = keep_mask(key, p, input.shape)
    return native_dropout_backward(input, keep, keep_scale(p)), keep


@lowering(aten.native_dropout_backward.default)
def native_dropout_backward(grad_output: jax.Array, mask: jax.Array, scale: float) -> jax.Array:
    """`grad * mask * scale`: a product, as in torch, so that NaN and inf in dropped places stay NaN."""
    g = widen(grad_output)
    return (g * dtypes.cast(mask, g.dtype) * scale).astype(grad_output.dtype)
