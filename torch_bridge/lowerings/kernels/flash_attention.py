"""Attention without the S x S matrix: scores are made block by block, with a running softmax, and made again in the backward pass.

Legend: N batch times heads, S queries, T keys, D head dim, E value dim, Q and C queries and keys of a block.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from torch_bridge.lowerings import random_keys
from torch_bridge.lowerings._opmath import wide_dtype
from torch_bridge.lowerings.attention import _pack_key as pack_key
from torch_bridge.lowerings.attention import _unpack_key as unpack_key
from torch_bridge.lowerings.dropout import keep_mask, keep_scale
from torch_bridge.lowerings.kernels import cudnn_attention
from torch_bridge.lowerings.matmul import dot
from torch_bridge.lowerings.types import Key
from torch_bridge.precision.precision_mode import PLAIN, Mode

BLOCK = 256
"""Queries, and keys, of a block: the fastest of 128 to 1024 on CPUs (a block of scores stays in the cache)."""


class Options(NamedTuple):
    """What shapes the program.

    causal: query s sees keys t <= s.
    block: queries, and keys, of a block; shorter inputs are one block.
    mode: the precision of the program.
    """

    scale: float
    causal: bool = True
    dropout_p: float = 0.0
    block: int = BLOCK
    mode: Mode = PLAIN


class _Blocks(NamedTuple):
    """How lengths are cut: rows and columns of a block, and the (row block, column block) pairs that have anything to see."""

    rows: int
    columns: int
    pairs: np.ndarray


Carry = tuple[jax.Array, ...]
Pair = jax.Array | np.ndarray
"""Which block of rows and which of columns."""
Position = jax.Array | np.integer


def _cut(S: int, T: int, o: Options) -> _Blocks:
    Q, C = min(S, o.block), min(T, o.block)
    pairs = [(i, j) for i in range(-(-S // Q)) for j in range(-(-T // C)) if not o.causal or j * C <= (i + 1) * Q - 1]
    return _Blocks(Q, C, np.array(pairs, np.int32))


def _padded(x: jax.Array, block: int) -> jax.Array:
    """Zeros up to a whole number of blocks along dim 1."""
    extra = -x.shape[1] % block
    return jnp.pad(x, [(0, 0), (0, extra)] + [(0, 0)] * (x.ndim - 2)) if extra else x


def _take(x: jax.Array, k: Position, block: int) -> jax.Array:
    return x if x.shape[1] == block else lax.dynamic_slice_in_dim(x, k * block, block, 1)


def _put(x: jax.Array, part: jax.Array, k: Position, block: int) -> jax.Array:
    return part if x.shape[1] == block else lax.dynamic_update_slice_in_dim(x, part, k * block, 1)


def _loop(step: Callable[[Carry, Pair], Carry], carry: Carry, pairs: np.ndarray) -> Carry:
    if len(pairs) == 1:
        return step(carry, pairs[0])
    return lax.scan(lambda c, pair: (step(c, pair), None), carry, pairs)[0]


def _scores(q_NQD: jax.Array, k_NCD: jax.Array, at: Pair, b: _Blocks, T: int, o: Options) -> jax.Array:
    """Scaled scores of a block in the opmath dtype, -inf where a query must not look."""
    s = dot(q_NQD, k_NCD, (((2,), (2,)), ((0,), (0,))), wide_dtype(q_NQD.dtype)) * o.scale
    column = at[1] * b.columns + lax.broadcasted_iota(jnp.int32, (b.rows, b.columns), 1)
    if o.causal:
        row = at[0] * b.rows + lax.broadcasted_iota(jnp.int32, (b.rows, b.columns), 0)
        s = jnp.where(column <= row, s, -jnp.inf)
    return s if T % b.columns == 0 else jnp.where(column < T, s, -jnp.inf)


def _dropped(p: jax.Array, at: Pair, key: Any, o: Options) -> jax.Array:
    """A block of weights (or of their gradients) with dropout; both directions draw the same mask."""
    if not o.dropout_p:
        return p
    block_key = random_keys.fold_in(random_keys.fold_in(key, at[0]), at[1])
    return jnp.where(keep_mask(block_key, o.dropout_p, p.shape), p * keep_scale(o.dropout_p), 0)


def forward(q_NSD: jax.Array, k_NTD: jax.Array, v_NTE: jax.Array, o: Options, key: Key | None = None) -> tuple[jax.Array, jax.Array]:
    """Output [N, S, E] and logsumexp [N, S], both in the opmath dtype (float32 for half precision). `key` is needed for dropout."""
    S, T = q_NSD.shape[1], k_NTD.shape[1]
    b = _cut(S, T, o)
    wide = wide_dtype(q_NSD.dtype)
    q = _padded(q_NSD, b.rows)
    k, v = _padded(k_NTD, b.columns), _padded(v_NTE, b.columns)

    def step(carry: Carry, at: Pair) -> Carry:
        acc, top, total = (_take(x, at[0], b.rows) for x in carry)
        s = _scores(_take(q, at[0], b.rows), _take(k, at[1], b.columns), at, b, T, o)
        new_top = jnp.maximum(top, jnp.max(s, axis=-1))
        p = jnp.exp(s - new_top[..., None])
        shrink = jnp.exp(top - new_top)
        mixed = dot(_dropped(p, at, key, o).astype(v.dtype), _take(v, at[1], b.columns), (((2,), (1,)), ((0,), (0,))), wide)
        news = (acc * shrink[..., None] + mixed, new_top, total * shrink + jnp.sum(p, axis=-1))
        return tuple(_put(x, new, at[0], b.rows) for x, new in zip(carry, news, strict=True))

    size = q.shape[:2]
    start = jnp.zeros((*size, v.shape[2]), wide), jnp.full(size, -jnp.inf, wide), jnp.zeros(size, wide)
    acc, top, total = _loop(step, start, b.pairs)
    return (acc / total[..., None])[:, :S], (jnp.log(total) + top)[:, :S]


def backward(
    grad_NSE: jax.Array,
    q_NSD: jax.Array,
    k_NTD: jax.Array,
    v_NTE: jax.Array,
    logsumexp_NS: jax.Array,
    delta_NS: jax.Array,
    o: Options,
    key: Key | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of q, k and v in the opmath dtype; `delta` is `sum(grad * out, -1)`. Weights are made again from the logsumexp."""
    S, T = q_NSD.shape[1], k_NTD.shape[1]
    b = _cut(S, T, o)
    wide = wide_dtype(q_NSD.dtype)
    grad, q, logsumexp, delta = (_padded(x, b.rows) for x in (grad_NSE.astype(q_NSD.dtype), q_NSD, logsumexp_NS, delta_NS))
    k, v = _padded(k_NTD, b.columns), _padded(v_NTE, b.columns)

    def step(carry: Carry, at: Pair) -> Carry:
        dq, dk, dv = carry
        g, qi, li, di = (_take(x, at[0], b.rows) for x in (grad, q, logsumexp, delta))
        kj, vj = (_take(x, at[1], b.columns) for x in (k, v))
        p = jnp.exp(_scores(qi, kj, at, b, T, o) - li[..., None])
        dv_part = dot(_dropped(p, at, key, o).astype(v.dtype), g, (((1,), (1,)), ((0,), (0,))), wide)
        dp = _dropped(dot(g, vj, (((2,), (2,)), ((0,), (0,))), wide), at, key, o)
        ds = (p * (dp - di[..., None]) * o.scale).astype(q.dtype)
        dq_part = dot(ds, kj, (((2,), (1,)), ((0,), (0,))), wide)
        dk_part = dot(ds, qi, (((1,), (1,)), ((0,), (0,))), wide)
        return _plus(dq, dq_part, at[0], b.rows), _plus(dk, dk_part, at[1], b.columns), _plus(dv, dv_part, at[1], b.columns)

    start = tuple(jnp.zeros(x.shape, wide) for x in (q, k, v))
    dq, dk, dv = _loop(step, start, b.pairs)
    return dq[:, :S], dk[:, :T], dv[:, :T]


def _plus(x: jax.Array, part: jax.Array, k: Position, block: int) -> jax.Array:
    return _put(x, _take(x, k, block) + part, k, block)


# -- one function with its gradient -----------------------------------------------------------------


def merged(x: jax.Array) -> jax.Array:
    """[B, H, S, D] -> [N, S, D]"""
    return x.reshape(-1, *x.shape[2:])


def rows(x: jax.Array) -> jax.Array:
    """[B, H, S] -> [N, S]"""
    return x.reshape(-1, x.shape[2])


def delta_of(grad: jax.Array, out: jax.Array) -> jax.Array:
    wide = wide_dtype(out.dtype)
    return jnp.sum(grad.astype(wide) * out.astype(wide), axis=-1)


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def flash_attention(q: jax.Array, k: jax.Array, v: jax.Array, seed: jax.Array, o: Options) -> tuple[jax.Array, jax.Array]:
    """Attention of q [B, H, S, D], k [B, H, T, D], v [B, H, T, E]: output [B, H, S, E] in the dtype of q, and logsumexp [B, H, S] in the opmath
    dtype (no gradient goes through it).

    seed: 0-d int64 that the dropout mask is drawn from (see `pack_key`); unused without dropout. Memory is linear in the lengths, in both
    directions. Differentiable by JAX in reverse mode. On CUDA devices cuDNN computes what it can (see `cudnn_attention`).
    """

    def blocks(q: jax.Array, k: jax.Array, v: jax.Array, _: None) -> tuple[jax.Array, jax.Array]:
        out, logsumexp = forward(merged(q), merged(k), merged(v), o, _key(seed, o))
        return out.reshape(*q.shape[:3], v.shape[3]).astype(q.dtype), logsumexp.reshape(q.shape[:3])

    return cudnn_attention.forward_or(blocks, q, k, v, None, o.dropout_p, o.causal, o.scale, o.mode)


def _key(seed: jax.Array, o: Options) -> Key | None:
    return unpack_key(seed) if o.dropout_p else None


def gradients(
    grad: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array, out: jax.Array, logsumexp: jax.Array, seed: jax.Array, o: Options
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The gradients of q, k and v of `flash_attention`, from its results."""

    def blocks(
        grad: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array, _: None, out: jax.Array, logsumexp: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        found = backward(merged(grad), merged(q), merged(k), merged(v), rows(logsumexp), rows(delta_of(grad, out)), o, _key(seed, o))
        dq, dk, dv = (g.reshape(x.shape).astype(x.dtype) for g, x in zip(found, (q, k, v), strict=True))
        return dq, dk, dv

    return cudnn_attention.backward_or(blocks, grad, q, k, v, None, out, logsumexp, o.dropout_p, o.causal, o.scale, o.mode)


def _keep(
    q: jax.Array, k: jax.Array, v: jax.Array, seed: jax.Array, o: Options
) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, ...]]:
    out, logsumexp = flash_attention(q, k, v, seed, o)
    return (out, logsumexp), (q, k, v, out, logsumexp, seed)


def _pull(o: Options, kept: tuple[jax.Array, ...], cotangents: tuple[jax.Array, ...]) -> tuple[jax.Array | None, ...]:
    q, k, v, out, logsumexp, seed = kept
    return (*gradients(cotangents[0], q, k, v, out, logsumexp, seed, o), None)


flash_attention.defvjp(_keep, _pull)

__all__ = ["BLOCK", "Options", "backward", "flash_attention", "forward", "gradients", "pack_key", "unpack_key"]
