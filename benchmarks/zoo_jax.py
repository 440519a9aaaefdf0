"""Models of `zoo.py` as one would write them by hand in JAX and Optax: pure functions on trees of weights, and one jitted train step.

Here are the train step, a perceptron and recurrent models; `zoo_jax_images.py` has those of convolutions, `zoo_jax_text.py` those of transformers. Start
weights are the torch model's. Weights are [in, out], images [B, height, width, channels].

Shape suffixes: B batch, S sequence, D width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import zoo_jax_images
import zoo_jax_text
from torch import Tensor, nn
from zoo_jax_text import Model, Params, Weights, cross_entropy, dropout, linear, linear_of

RATE = 0.1
"""Of every dropout in the zoo."""


def make(kind: str, model: nn.Module, rate: float = RATE) -> Model:
    """The torch model of a kind of `KINDS`, its weights copied. rate: of dropout."""
    weights = {name: value.numpy() for name, value in model.state_dict().items()}
    made = KINDS[kind](model, weights, rate)
    return Model(jax.tree.map(jnp.array, made.params), jax.tree.map(jnp.array, made.state), made.loss)


def batch_of(parts: Sequence[Tensor]) -> tuple[jax.Array, ...]:
    """A batch of the zoo: integers in 32 bits, images with their channels last."""
    arrays = [part.numpy() for part in parts]
    return tuple(jnp.array(a.astype(np.int32) if a.dtype == np.int64 else np.moveaxis(a, 1, -1) if a.ndim == 4 else a) for a in arrays)


def trainer(model: Model) -> Callable[..., float]:
    """`step(*batch)` trains the model with AdamW, as torch's has it by default, and waits for the loss. The model's arrays are used up."""
    optimizer = optax.adamw(1e-3, b1=0.9, b2=0.999, eps=1e-8, weight_decay=0.01)

    @partial(jax.jit, donate_argnums=(0, 1, 2))
    def train_step(params: Params, moments: optax.OptState, state: Any, *batch: jax.Array) -> tuple[Params, optax.OptState, Any, jax.Array]:
        (loss, state), grads = jax.value_and_grad(model.loss, has_aux=True)(params, state, *batch)
        updates, moments = optimizer.update(grads, moments, params)
        return optax.apply_updates(params, updates), moments, state, loss

    params, state = model.params, model.state
    moments = jax.jit(optimizer.init)(params)

    def step(*batch: jax.Array) -> float:
        nonlocal params, moments, state
        params, moments, state, loss = train_step(params, moments, state, *batch)
        return float(loss)

    return step


def mlp(model: nn.Module, weights: Weights, rate: float) -> Model:
    """A perceptron with GELU and dropout."""
    names = [name.removesuffix(".weight") for name in weights if name.endswith(".weight")]

    def loss(layers: list[Params], key: jax.Array, x_BD: jax.Array, labels_B: jax.Array) -> tuple[jax.Array, jax.Array]:
        key, *keys = jax.random.split(key, len(layers))
        for layer, own in zip(layers[:-1], keys, strict=True):
            x_BD = dropout(jax.nn.gelu(linear(layer, x_BD), approximate=False), rate, own)
        return cross_entropy(linear(layers[-1], x_BD), labels_B), key

    return Model([linear_of(weights, name) for name in names], jax.random.key(0), loss)


# ------------------------------------------------------------------------------------------------------------------ lstm


def _lstm_of(weights: Weights, place: str) -> Params:
    """Of torch's `nn.LSTM` or `nn.LSTMCell`. place: names of its weights, with {} for the kind."""
    names = {"input": "weight_ih", "hidden": "weight_hh", "input_bias": "bias_ih", "hidden_bias": "bias_hh"}
    return {name: weights[place.format(key)].T for name, key in names.items()}


def lstm_layer(p: Params, x_SBD: jax.Array) -> jax.Array:
    """All steps of a layer; what the inputs add to the gates is one product, before the loop."""
    gates_SBG = x_SBD @ p["input"] + p["input_bias"] + p["hidden_bias"]
    zeros_BD = jnp.zeros((x_SBD.shape[1], p["hidden"].shape[0]), x_SBD.dtype)

    def cell(carry: tuple[jax.Array, jax.Array], gates_BG: jax.Array) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        h_BD, c_BD = carry
        i, f, g, o = jnp.split(gates_BG + h_BD @ p["hidden"], 4, axis=-1)
        c_BD = jax.nn.sigmoid(f) * c_BD + jax.nn.sigmoid(i) * jnp.tanh(g)
        h_BD = jax.nn.sigmoid(o) * jnp.tanh(c_BD)
        return (h_BD, c_BD), h_BD

    return jax.lax.scan(cell, (zeros_BD, zeros_BD), gates_SBG)[1]


def lstm(model: nn.Module, weights: Weights, rate: float) -> Model:
    """A language model of LSTM layers."""
    count = sum("weight_ih" in name for name in weights)
    params = {
        "embedding": weights["embed.weight"],
        "layers": [_lstm_of(weights, f"lstm.{{}}_l{layer}") for layer in range(count)],
        "head": linear_of(weights, "last"),
    }

    def loss(params: Params, key: jax.Array, ids_BS: jax.Array) -> tuple[jax.Array, jax.Array]:
        key, *keys = jax.random.split(key, count)
        x_SBD = params["embedding"][ids_BS[:, :-1].T]
        for k, layer in enumerate(params["layers"]):
            x_SBD = lstm_layer(layer, dropout(x_SBD, rate, keys[k - 1]) if k else x_SBD)
        return cross_entropy(linear(params["head"], x_SBD), ids_BS[:, 1:].T), key

    return Model(params, jax.random.key(0), loss)


def cells(model: nn.Module, weights: Weights, rate: float) -> Model:
    """A language model that is one LSTM layer."""
    params = {
        "embedding": weights["embed.weight"],
        "cell": _lstm_of(weights, "cell.{}"),
        "head": linear_of(weights, "last"),
    }

    def loss(params: Params, state: None, ids_BS: jax.Array) -> tuple[jax.Array, None]:
        x_SBD = lstm_layer(params["cell"], params["embedding"][ids_BS[:, :-1].T])
        return cross_entropy(linear(params["head"], x_SBD), ids_BS[:, 1:].T), None

    return Model(params, None, loss)


KINDS: dict[str, Callable[[nn.Module, Weights, float], Model]] = {
    "mlp": mlp,
    **zoo_jax_images.KINDS,
    "lstm": lstm,
    "cells": cells,
    "bert": zoo_jax_text.bert,
    "gpt2": zoo_jax_text.gpt2,
    "llama": zoo_jax_text.llama,
}
