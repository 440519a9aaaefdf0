"""Scaled dot-product attention: one core function, and the fused ops that torch reaches on device "xla".

Legend: B batch, H query heads, K key/value heads (H = K * G), S queries, T keys, D head dim, E value dim.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax import lax

from torch_bridge.lowerings import random_keys, traced_once
from torch_bridge.lowerings._opmath import wide_dtype
from torch_bridge.lowerings.dropout import keep_mask, keep_scale
from torch_bridge.lowerings.kernels import cudnn_attention
from torch_bridge.lowerings.matmul import dot
from torch_bridge.lowerings.registry import lowering
from torch_bridge.precision.precision_mode import PLAIN, Mode

aten = torch.ops.aten


def _scores(q_BHSD: jax.Array, k_BKTD: jax.Array) -> jax.Array:
    """q k^T in the opmath dtype, [B, H, S, T]. Query heads that share a key head are stacked along S: no repeated keys."""
    B, H, S, D = q_BHSD.shape
    K, T = k_BKTD.shape[1:3]
    grouped = q_BHSD.reshape(B, K, (H // K) * S, D)
    return dot(grouped, k_BKTD, (((3,), (3,)), ((0, 1), (0, 1))), wide_dtype(q_BHSD.dtype)).reshape(B, H, S, T)


def _mix(p_BHST: jax.Array, v_BKTE: jax.Array) -> jax.Array:
    B, H, S, T = p_BHST.shape
    K, E = v_BKTE.shape[1], v_BKTE.shape[3]
    return dot(p_BHST.reshape(B, K, (H // K) * S, T), v_BKTE, (((3,), (2,)), ((0, 1), (0, 1)))).reshape(B, H, S, E)


def _masked(scores: jax.Array, mask: jax.Array | None, is_causal: bool) -> jax.Array:
    """Boolean masks keep where True, others are added; causal keeps key t <= query s (top-left aligned, as torch)."""
    if is_causal:
        S, T = scores.shape[-2:]
        keep = lax.broadcasted_iota(jnp.int32, (S, T), 0) >= lax.broadcasted_iota(jnp.int32, (S, T), 1)
        scores = jnp.where(keep, scores, -jnp.inf)
    if mask is None:
        return scores
    return jnp.where(mask, scores, -jnp.inf) if mask.dtype == jnp.bool_ else scores + mask.astype(scores.dtype)


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: jax.Array | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    key: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """q [B, H, S, D], k [B, K, T, D], v [B, K, T, E] with H a multiple of K -> output [B, H, S, E] and logsumexp [B, H, S] (float32).

    `mask` broadcasts to [B, H, S, T]. A query that may see no key gives zeros, with zero gradients, as eager torch does.
    `key` is needed if `dropout_p` > 0. The softmax is float32 for half precision.
    """
    scores = _masked(_scores(q, k) * _scale(q, scale), mask, is_causal)
    top = lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True, initial=-jnp.inf))
    top = jnp.where(top == -jnp.inf, 0, top)
    e = jnp.exp(scores - top)
    total = jnp.sum(e, axis=-1, keepdims=True)
    logsumexp = lax.stop_gradient((jnp.log(total) + top)[..., 0].astype(jnp.float32))
    p = e / jnp.where(total == 0, 1, total)
    if dropout_p > 0:
        if key is None:
            raise ValueError(f"attention with dropout_p={dropout_p} needs a PRNG key")
        p = p * keep_mask(key, dropout_p, p.shape).astype(p.dtype) * keep_scale(dropout_p)
    return _mix(p.astype(v.dtype), v), logsumexp


def attention_weights(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Output [B, H, S, E] and weights [B, H, S, T] in the opmath dtype; a query that may see no key gives NaN."""
    p = jax.nn.softmax(_masked(_scores(q, k) * _scale(q, None), mask, is_causal=False), axis=-1)
    return _mix(p.astype(v.dtype), v), p


def _scale(q: jax.Array, scale: float | None) -> float:
    return 1 / math.sqrt(q.shape[-1]) if scale is None else scale


def _pack_key(key: jax.Array) -> jax.Array:
    """64 random bits as the 0-d int64 tensor that torch calls `philox_seed`."""
    return lax.bitcast_convert_type(jax.random.bits(key, (2,), jnp.uint32), jnp.int64)


def _unpack_key(seed: jax.Array) -> jax.Array:
    """The PRNG key that both directions draw the dropout mask from."""
    return random_keys.from_bits(seed)


def _as_4d(x: jax.Array) -> jax.Array:
    return x if x.ndim == 4 else x.reshape((1,) * (4 - x.ndim) + x.shape) if x.ndim < 4 else x.reshape(-1, *x.shape[-3:])


def _mask_as_4d(mask: jax.Array | None, lead: tuple[int, ...]) -> jax.Array | None:
    """A mask that broadcasts against 4-d scores, for queries with leading dims `lead` (all but the last two)."""
    if mask is None or len(lead) <= 2:
        return mask
    return jnp.broadcast_to(mask, (*lead, *mask.shape[-2:])).reshape(-1, lead[-1], *mask.shape[-2:])


@lowering(aten._scaled_dot_product_fused_attention_overrideable.default, rng=True, mode=True)
def fused_attention(
    query: jax.Array,
    key_: jax.Array,
    value: jax.Array,
    attn_bias: jax.Array | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
    key: jax.Array,
    mode: Mode = PLAIN,
) -> tuple[Any, ...]:
    """The structure of torch's meta kernel: no cumulative lengths, lengths as ints, seed and offset 0-d int64, no debug mask."""
    seed = _pack_key(key) if dropout_p > 0 else jnp.zeros((), jnp.int64)
    out, logsumexp = _run(query, key_, value, attn_bias, dropout_p, is_causal, scale, seed, mode)
    return out, logsumexp, None, None, query.shape[-2], key_.shape[-2], seed, jnp.zeros((), jnp.int64), None


def _run(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: jax.Array | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    seed: jax.Array,
    mode: Mode,
) -> tuple[jax.Array, jax.Array]:
    """`attention` for queries of 2 or more dims, by cuDNN where `cudnn_attention` chooses it."""

    def plain(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        return traced_once.call(_plain, (q, k, v, mask, dropout_p, is_causal, scale, seed), {})

    return cudnn_attention.forward_or(plain, q, k, v, mask, dropout_p, is_causal, _scale(q, scale), mode)


def _plain(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: jax.Array | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    seed: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """`attention` for queries of 2 or more dims, the dropout key restored from the seed."""
    key = _unpack_key(seed) if dropout_p > 0 else None
    mask = _mask_as_4d(mask, q.shape[:-2])
    out, logsumexp = attention(_as_4d(q), _as_4d(k), _as_4d(v), mask, dropout_p, is_causal, scale, key)
    return out.reshape(*q.shape[:-1], v.shape[-1]), logsumexp


def _plain_gradients(
    grad: jax.Array,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: jax.Array | None,
    floating: bool,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    seed: jax.Array,
) -> tuple[jax.Array, ...]:
    """Of q, k, v and, if it is `floating`, of the mask."""

    def forward(q: jax.Array, k: jax.Array, v: jax.Array, bias: jax.Array | None) -> jax.Array:
        return _plain(q, k, v, bias if floating else mask, dropout_p, is_causal, scale, seed)[0]

    _, vjp = jax.vjp(forward, q, k, v, mask if floating else None)
    return vjp(grad.astype(q.dtype))[: 4 if floating else 3]


@lowering(aten._scaled_dot_product_fused_attention_overrideable_backward.default, mode=True)
def fused_attention_backward(
    grad_out: jax.Array,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    attn_bias: jax.Array | None,
    grad_input_mask: list[bool],
    out: jax.Array,
    logsumexp: jax.Array,
    cum_seq_q: jax.Array,
    cum_seq_k: jax.Array,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: jax.Array,
    philox_offset: jax.Array,
    *,
    scale: float | None = None,
    mode: Mode = PLAIN,
) -> tuple[jax.Array | None, ...]:
    """cuDNN's backward pass where the forward was its own, else the VJP of the very same forward: inside one program XLA merges the two forwards."""
    floating = attn_bias is not None and jnp.issubdtype(attn_bias.dtype, jnp.floating)

    def plain(grad: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array | None, *_: jax.Array) -> Any:
        return traced_once.call(_plain_gradients, (grad, q, k, v, mask, floating, dropout_p, is_causal, scale, philox_seed), {})

    arrays = (grad_out, query, key, value, attn_bias, out, logsumexp)
    grads = cudnn_attention.backward_or(plain, *arrays, dropout_p, is_causal, _scale(query, scale), mode)
    return grads if floating else (*grads, None if attn_bias is None else jnp.zeros_like(attn_bias))


@lowering(aten.scaled_dot_product_attention.default, rng=True, mode=True)
def scaled_dot_product_attention(
    query: jax.Array,
    key_: jax.Array,
    value: jax.Array,
    attn_mask: jax.Array | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    key: jax.Array | None = None,
    mode: Mode = PLAIN,
) -> jax.Array:
    """`F.scaled_dot_product_attention` as one op, for graphs that keep it whole."""
    seed = _pack_key(key) if dropout_p > 0 and key is not None else jnp.zeros((), jnp.int64)
    lead = jnp.broadcast_shapes(query.shape[:-3], key_.shape[:-3], value.shape[:-3])
    q, k, v = (jnp.broadcast_to(x, (*lead, *x.shape[-3:])) if x.ndim > 2 else x for x in (query, key_, value))
    return _run(q, k, v, attn_mask, dropout_p, is_causal, scale, seed, mode)[0]
