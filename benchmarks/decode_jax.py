"""A Llama that generates greedily, as one would write it by hand in JAX: a static KV cache, one jitted program for the prompt and one for each further token.

Shape suffixes: B batch, S tokens, L cache slots, D hidden, N heads, H head size, V vocabulary.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from llama_jax import Params, rms_norm

Cache = list[tuple[jax.Array, jax.Array]]


def empty_cache(layers: int, length: int, heads: int, size: int) -> Cache:
    """Zeros of shape [B, L, N, H] for K and V of each layer."""
    return [(jnp.zeros((1, length, heads, size)), jnp.zeros((1, length, heads, size))) for _ in range(layers)]


def _rotate(x_BSNH: jax.Array, positions_S: jax.Array, theta: float = 10000.0) -> jax.Array:
    half = x_BSNH.shape[-1] // 2
    angles_SH = positions_S[:, None] / theta ** (jnp.arange(half) / half)
    cos, sin = jnp.cos(angles_SH)[:, None], jnp.sin(angles_SH)[:, None]
    left, right = x_BSNH[..., :half], x_BSNH[..., half:]
    return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)


@partial(jax.jit, static_argnames="heads", donate_argnames="cache")
def step(params: Params, cache: Cache, ids_BS: jax.Array, start: jax.Array, heads: int) -> tuple[jax.Array, Cache]:
    """The likeliest token after `ids`, which stand at positions from `start` on, [B]; and the cache with their keys and values."""
    positions_S = start + jnp.arange(ids_BS.shape[1])
    x_BSD = params["embedding"][ids_BS]
    new: Cache = []
    for layer, (k_cache, v_cache) in zip(params["layers"], cache, strict=True):
        h_BSD = rms_norm(x_BSD, layer["attention_norm"])
        q, k, v = ((h_BSD @ layer[n]).reshape(*h_BSD.shape[:2], heads, -1) for n in "qkv")
        k_cache = jax.lax.dynamic_update_slice_in_dim(k_cache, _rotate(k, positions_S), start, axis=1)
        v_cache = jax.lax.dynamic_update_slice_in_dim(v_cache, v, start, axis=1)
        new.append((k_cache, v_cache))
        seen_SL = positions_S[:, None] >= jnp.arange(k_cache.shape[1])
        out = jax.nn.dot_product_attention(_rotate(q, positions_S), k_cache, v_cache, mask=seen_SL[None, None])
        x_BSD = x_BSD + out.reshape(x_BSD.shape) @ layer["o"]
        h_BSD = rms_norm(x_BSD, layer["mlp_norm"])
        x_BSD = x_BSD + (jax.nn.silu(h_BSD @ layer["gate"]) * (h_BSD @ layer["up"])) @ layer["down"]
    logits_BV = rms_norm(x_BSD[:, -1], params["norm"]) @ params["head"]
    return logits_BV.argmax(-1), new


def generate(params: Params, prompt: Any, count: int, length: int, heads: int, size: int) -> list[int]:
    """`count` tokens after a prompt, greedily, each read on the host."""
    cache = empty_cache(len(params["layers"]), length, heads, size)
    token, cache = step(params, cache, jnp.asarray([prompt], jnp.int32), jnp.int32(0), heads)
    found = [int(token[0])]
    for position in range(len(prompt), len(prompt) + count - 1):
        token, cache = step(params, cache, token[:, None].astype(jnp.int32), jnp.int32(position), heads)
        found.append(int(token[0]))
    return found
