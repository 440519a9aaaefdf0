"""BERT, GPT-2 and Llama of `zoo.py` in JAX, and the layers that they share with the models of `zoo_jax.py`.

Shape suffixes: B batch, S and T sequence, D width, N heads, H head size, V vocabulary. Weights are [in, out].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import llama_jax
import numpy as np
import optax

Params = dict[str, Any]
Weights = dict[str, np.ndarray]


@dataclass(frozen=True)
class Model:
    """A tree of weights, what else changes in a step (a key, running statistics), and `loss(params, state, *batch)`: the loss and the next state."""

    params: Any
    state: Any
    loss: Callable[..., tuple[jax.Array, Any]]


def linear_of(weights: Weights, name: str) -> Params:
    """Of torch's `nn.Linear`."""
    return {"kernel": weights[f"{name}.weight"].T, "bias": weights[f"{name}.bias"]}


def linear(p: Params, x: jax.Array) -> jax.Array:
    return x @ p["kernel"] + p["bias"]


def norm_of(weights: Weights, name: str) -> Params:
    """Of torch's `nn.LayerNorm`."""
    return {"scale": weights[f"{name}.weight"], "shift": weights[f"{name}.bias"]}


def layer_norm(p: Params, x: jax.Array, eps: float) -> jax.Array:
    mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(variance + eps) * p["scale"] + p["shift"]


def dropout(x: jax.Array, rate: float, key: jax.Array) -> jax.Array:
    """Inverted dropout; a rate of 0 draws nothing."""
    return jnp.where(jax.random.bernoulli(key, 1 - rate, x.shape), x / (1 - rate), 0) if rate else x


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """The mean, in nats."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def attention(q_BSD: jax.Array, k_BSD: jax.Array, v_BSD: jax.Array, heads: int, causal: bool, rate: float, key: jax.Array) -> jax.Array:
    """Attention with dropout of its probabilities, which `jax.nn.dot_product_attention` does not have."""
    q_BSNH, k_BTNH, v_BTNH = (x.reshape(*x.shape[:2], heads, -1) for x in (q_BSD, k_BSD, v_BSD))
    scores_BNST = jnp.einsum("bsnh,btnh->bnst", q_BSNH, k_BTNH) * q_BSNH.shape[-1] ** -0.5
    if causal:
        length = q_BSD.shape[1]
        scores_BNST = jnp.where(jnp.tri(length, dtype=bool), scores_BNST, jnp.finfo(scores_BNST.dtype).min)
    shares_BNST = dropout(jax.nn.softmax(scores_BNST), rate, key)
    return jnp.einsum("bnst,btnh->bsnh", shares_BNST, v_BTNH).reshape(q_BSD.shape)


# ------------------------------------------------------------------------------------------------------------------ bert

BERT_LAYER = {
    "query": "attention.self.query",
    "key": "attention.self.key",
    "value": "attention.self.value",
    "out": "attention.output.dense",
    "up": "intermediate.dense",
    "down": "output.dense",
}
BERT_NORMS = {"attention_norm": "attention.output.LayerNorm", "mlp_norm": "output.LayerNorm"}


def _bert_layer(weights: Weights, number: int) -> Params:
    prefix = f"bert.encoder.layer.{number}."
    linears = {name: linear_of(weights, prefix + key) for name, key in BERT_LAYER.items()}
    return linears | {name: norm_of(weights, prefix + key) for name, key in BERT_NORMS.items()}


def bert(model: Any, weights: Weights, rate: float) -> Model:
    """BERT with a masked language model's head, whose decoder is the embedding."""
    heads, eps, padding = model.config.num_attention_heads, model.config.layer_norm_eps, model.config.pad_token_id
    count = model.config.num_hidden_layers
    params = {
        "embedding": weights["bert.embeddings.word_embeddings.weight"],
        "positions": weights["bert.embeddings.position_embeddings.weight"],
        "types": weights["bert.embeddings.token_type_embeddings.weight"],
        "norm": norm_of(weights, "bert.embeddings.LayerNorm"),
        "layers": [_bert_layer(weights, number) for number in range(count)],
        "transform": linear_of(weights, "cls.predictions.transform.dense"),
        "head_norm": norm_of(weights, "cls.predictions.transform.LayerNorm"),
        "bias": weights["cls.predictions.bias"],
    }

    def block(p: Params, x_BSD: jax.Array, keys: jax.Array) -> jax.Array:
        q_BSD, k_BSD, v_BSD = (linear(p[name], x_BSD) for name in ("query", "key", "value"))
        h_BSD = attention(q_BSD, k_BSD, v_BSD, heads, False, rate, keys[0])
        x_BSD = layer_norm(p["attention_norm"], x_BSD + dropout(linear(p["out"], h_BSD), rate, keys[1]), eps)
        h_BSD = linear(p["down"], jax.nn.gelu(linear(p["up"], x_BSD), approximate=False))
        return layer_norm(p["mlp_norm"], x_BSD + dropout(h_BSD, rate, keys[2]), eps)

    def loss(params: Params, key: jax.Array, ids_BS: jax.Array, labels_BS: jax.Array) -> tuple[jax.Array, jax.Array]:
        key, first, *keys = jax.random.split(key, 2 + count)
        x_BSD = params["embedding"][ids_BS]
        x_BSD = jnp.where(ids_BS[..., None] == padding, jax.lax.stop_gradient(x_BSD), x_BSD)  # torch's padding_idx
        x_BSD += params["types"][0] + params["positions"][: ids_BS.shape[1]]
        x_BSD = dropout(layer_norm(params["norm"], x_BSD, eps), rate, first)
        for p, own in zip(params["layers"], keys, strict=True):
            x_BSD = block(p, x_BSD, jax.random.split(own, 3))
        h_BSD = layer_norm(params["head_norm"], jax.nn.gelu(linear(params["transform"], x_BSD), approximate=False), eps)
        return cross_entropy(h_BSD @ params["embedding"].T + params["bias"], labels_BS), key

    return Model(params, jax.random.key(0), loss)


# ------------------------------------------------------------------------------------------------------------------ gpt2


def _gpt2_layer(weights: Weights, number: int) -> Params:
    prefix = f"transformer.h.{number}."
    linears = {"qkv": "attn.c_attn", "out": "attn.c_proj", "up": "mlp.c_fc", "down": "mlp.c_proj"}
    layer: Params = {
        name: {"kernel": weights[f"{prefix}{key}.weight"], "bias": weights[f"{prefix}{key}.bias"]}  # [in, out] there too
        for name, key in linears.items()
    }
    return layer | {"attention_norm": norm_of(weights, prefix + "ln_1"), "mlp_norm": norm_of(weights, prefix + "ln_2")}


def gpt2(model: Any, weights: Weights, rate: float) -> Model:
    """GPT-2, whose head is the embedding."""
    heads, eps, count = model.config.n_head, model.config.layer_norm_epsilon, model.config.n_layer
    params = {
        "embedding": weights["transformer.wte.weight"],
        "positions": weights["transformer.wpe.weight"],
        "layers": [_gpt2_layer(weights, number) for number in range(count)],
        "norm": norm_of(weights, "transformer.ln_f"),
    }

    def block(p: Params, x_BSD: jax.Array, keys: jax.Array) -> jax.Array:
        q_BSD, k_BSD, v_BSD = jnp.split(linear(p["qkv"], layer_norm(p["attention_norm"], x_BSD, eps)), 3, axis=-1)
        h_BSD = attention(q_BSD, k_BSD, v_BSD, heads, True, rate, keys[0])
        x_BSD = x_BSD + dropout(linear(p["out"], h_BSD), rate, keys[1])
        h_BSD = jax.nn.gelu(linear(p["up"], layer_norm(p["mlp_norm"], x_BSD, eps)), approximate=True)
        return x_BSD + dropout(linear(p["down"], h_BSD), rate, keys[2])

    def loss(params: Params, key: jax.Array, ids_BS: jax.Array) -> tuple[jax.Array, jax.Array]:
        key, first, *keys = jax.random.split(key, 2 + count)
        x_BSD = dropout(params["embedding"][ids_BS] + params["positions"][: ids_BS.shape[1]], rate, first)
        for p, own in zip(params["layers"], keys, strict=True):
            x_BSD = block(p, x_BSD, jax.random.split(own, 3))
        logits_BSV = layer_norm(params["norm"], x_BSD[:, :-1], eps) @ params["embedding"].T
        return cross_entropy(logits_BSV, ids_BS[:, 1:]), key

    return Model(params, jax.random.key(0), loss)


# ------------------------------------------------------------------------------------------------------------------ llama


def llama(model: Any, weights: Weights, rate: float) -> Model:
    """`llama_jax.py` with grouped queries, which its attention does not have."""
    size = model.config.hidden_size // model.config.num_attention_heads

    def block(p: Params, x_BSD: jax.Array) -> jax.Array:
        h_BSD = llama_jax.rms_norm(x_BSD, p["attention_norm"])
        q, k, v = ((h_BSD @ p[name]).reshape(*x_BSD.shape[:2], -1, size) for name in "qkv")
        h_BSNH = jax.nn.dot_product_attention(llama_jax.rotate(q), llama_jax.rotate(k), v, is_causal=True)
        x_BSD = x_BSD + h_BSNH.reshape(x_BSD.shape) @ p["o"]
        h_BSD = llama_jax.rms_norm(x_BSD, p["mlp_norm"])
        return x_BSD + (jax.nn.silu(h_BSD @ p["gate"]) * (h_BSD @ p["up"])) @ p["down"]

    def loss(params: Params, state: None, ids_BS: jax.Array) -> tuple[jax.Array, None]:
        x_BSD = params["embedding"][ids_BS]
        for p in params["layers"]:
            x_BSD = block(p, x_BSD)
        logits_BSV = llama_jax.rms_norm(x_BSD, params["norm"])[:, :-1] @ params["head"]
        return cross_entropy(logits_BSV, ids_BS[:, 1:]), None

    return Model(llama_jax.from_torch(weights), None, loss)
