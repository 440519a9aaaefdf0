"""Dropout with the mask as a result, so that the backward op uses the same one."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import torch

from torch_bridge.lowerings._opmath import widen
from torch_bridge.lowerings.registry import lowering

aten = torch.ops.aten


def keep_mask(key: jax.Array, p: float, shape: tuple[int, ...]) -> jax.Array:
    """A boolean mask that is True with probability `1 - p`, from 32 random bits an element."""
    if p >= 1:
        return jnp.zeros(shape, jnp.bool_)
    bits = jax.random.bits(key, shape, jnp.uint32)
    return bits >= jnp.uint32(min(round(p * 2**32), 2**32 - 1))


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
    return (g * mask.astype(g.dtype) * scale).astype(grad_output.dtype)
