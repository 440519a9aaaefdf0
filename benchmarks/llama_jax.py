"""Llama's loss as one would write it by hand in JAX: RMSNorm, rotary embedding, causal attention, SwiGLU, next-token cross-entropy.

Shape suffixes: B batch, S sequence, D hidden, F intermediate, N heads, H head size, V vocabulary. Weights are [in, out].
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

Params = dict[str, Any]


def from_torch(state: dict[str, np.ndarray]) -> Params:
    """The weights of a `transformers` Llama (`state_dict` as numpy arrays) as a tree, with linear weights transposed to [in, out]."""
    layers: list[Params] = []
    while f"model.layers.{len(layers)}.input_layernorm.weight" in state:
        prefix = f"model.layers.{len(layers)}."
        linear = {name: prefix + f"self_attn.{name}_proj.weight" for name in "qkvo"}
        linear |= {name: prefix + f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")}
        layer: Params = {name: jnp.asarray(state[key].T) for name, key in linear.items()}
        layer["attention_norm"] = jnp.asarray(state[prefix + "input_layernorm.weight"])
        layer["mlp_norm"] = jnp.asarray(state[prefix + "post_attention_layernorm.weight"])
        layers.append(layer)
    return {
        "embedding": jnp.asarray(state["model.embed_tokens.weight"]),
        "layers": layers,
        "norm": jnp.asarray(state["model.norm.weight"]),
        "head": jnp.asarray(state["lm_head.weight"].T),
    }


def rms_norm(x: jax.Array, weight: jax.Array, eps: float = 1e-6) -> jax.Array:
    return weight * (x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps))


def rotate(x_BSNH: jax.Array, theta: float = 10000.0) -> jax.Array:
    seq, half = x_BSNH.shape[1], x_BSNH.shape[-1] // 2
    angles_SH = jnp.arange(seq)[:, None] / theta ** (jnp.arange(half) / half)
    cos, sin = jnp.cos(angles_SH)[:, None], jnp.sin(angles_SH)[:, None]
    left, right = x_BSNH[..., :half], x_BSNH[..., half:]
    return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)


def attention(layer: Params, x_BSD: jax.Array, heads: int, mask_BS: jax.Array | None = None) -> jax.Array:
    q, k, v = ((x_BSD @ layer[name]).reshape(*x_BSD.shape[:2], heads, -1) for name in "qkv")
    mask_B11S = None if mask_BS is None else mask_BS[:, None, None, :] != 0
    out_BSNH = jax.nn.dot_product_attention(rotate(q), rotate(k), v, mask=mask_B11S, is_causal=True)
    return out_BSNH.reshape(x_BSD.shape) @ layer["o"]


def loss_fn(params: Params, ids_BS: jax.Array, heads: int, mask_BS: jax.Array | None = None) -> jax.Array:
    """Mean cross-entropy in nats of predicting each token from those before it. mask_BS: nonzero where a token may be attended to (None: everywhere)."""
    x_BSD = params["embedding"][ids_BS]
    for layer in params["layers"]:
        x_BSD = x_BSD + attention(layer, rms_norm(x_BSD, layer["attention_norm"]), heads, mask_BS)
        h_BSD = rms_norm(x_BSD, layer["mlp_norm"])
        x_BSD = x_BSD + (jax.nn.silu(h_BSD @ layer["gate"]) * (h_BSD @ layer["up"])) @ layer["down"]
    logits_BSV = rms_norm(x_BSD, params["norm"])[:, :-1] @ params["head"]
    return optax.softmax_cross_entropy_with_integer_labels(logits_BSV, ids_BS[:, 1:]).mean()
