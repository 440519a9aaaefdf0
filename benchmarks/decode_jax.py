"""A Llama and a GPT-2 that generate greedily, as one would write them by hand in JAX: a static KV cache, one jitted program for the prompt and one for each
further token.

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


def gpt2_from_torch(state: dict[str, Any]) -> Params:
    """The weights of a `transformers` GPT-2 (`state_dict` as numpy arrays) as a tree, whose linear weights are [in, out] as they are."""
    of = {name.removeprefix("transformer."): jnp.asarray(x) for name, x in state.items() if name != "lm_head.weight"}
    count = 1 + max(int(name.split(".")[1]) for name in of if name.startswith("h."))
    layers = [{name.removeprefix(f"h.{k}."): x for name, x in of.items() if name.startswith(f"h.{k}.")} for k in range(count)]
    return {"layers": layers, **{name: x for name, x in of.items() if not name.startswith("h.")}}


def _layer_norm(params: Params, name: str, x: jax.Array) -> jax.Array:
    centred = x - x.mean(-1, keepdims=True)
    return centred * jax.lax.rsqrt((centred * centred).mean(-1, keepdims=True) + 1e-5) * params[f"{name}.weight"] + params[f"{name}.bias"]


def _linear(params: Params, name: str, x: jax.Array) -> jax.Array:
    return x @ params[f"{name}.weight"] + params[f"{name}.bias"]


@partial(jax.jit, static_argnames="heads", donate_argnames="cache")
def gpt2_step(params: Params, cache: Cache, ids_BS: jax.Array, start: jax.Array, heads: int) -> tuple[jax.Array, Cache]:
    """`step` of a GPT-2."""
    positions_S = start + jnp.arange(ids_BS.shape[1])
    x_BSD = params["wte.weight"][ids_BS] + params["wpe.weight"][positions_S]
    new: Cache = []
    for layer, (k_cache, v_cache) in zip(params["layers"], cache, strict=True):
        qkv = jnp.split(_linear(layer, "attn.c_attn", _layer_norm(layer, "ln_1", x_BSD)), 3, axis=-1)
        q, k, v = (t.reshape(*t.shape[:2], heads, -1) for t in qkv)
        k_cache = jax.lax.dynamic_update_slice_in_dim(k_cache, k, start, axis=1)
        v_cache = jax.lax.dynamic_update_slice_in_dim(v_cache, v, start, axis=1)
        new.append((k_cache, v_cache))
        seen_SL = positions_S[:, None] >= jnp.arange(k_cache.shape[1])
        out = jax.nn.dot_product_attention(q, k_cache, v_cache, mask=seen_SL[None, None])
        x_BSD = x_BSD + _linear(layer, "attn.c_proj", out.reshape(x_BSD.shape))
        hidden = jax.nn.gelu(_linear(layer, "mlp.c_fc", _layer_norm(layer, "ln_2", x_BSD)))
        x_BSD = x_BSD + _linear(layer, "mlp.c_proj", hidden)
    logits_BV = _layer_norm(params, "ln_f", x_BSD[:, -1]) @ params["wte.weight"].T
    return logits_BV.argmax(-1), new


def generate(of: Any, params: Params, layers: int, prompt: Any, count: int, length: int, heads: int, size: int) -> list[int]:
    """`count` tokens after a prompt, greedily, each read on the host. of: `step` or `gpt2_step`."""
    cache = empty_cache(layers, length, heads, size)
    token, cache = of(params, cache, jnp.asarray([prompt], jnp.int32), jnp.int32(0), heads)
    found = [int(token[0])]
    for position in range(len(prompt), len(prompt) + count - 1):
        token, cache = of(params, cache, token[:, None].astype(jnp.int32), jnp.int32(position), heads)
        found.append(int(token[0]))
    return found
