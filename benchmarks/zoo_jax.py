"""Models of `zoo.py` as one would write them by hand in JAX and Optax: pure functions on trees of weights, and one jitted train step.

Here are the train step and the models of plain torch (mlp, resnet, lstm); `zoo_jax_text.py` has those of transformers. Start weights are the torch model's.
Weights are [in, out], images [B, height, width, channels].

Shape suffixes: B batch, S sequence, D width, C channels, Y and X height and width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import zoo_jax_text
import zoo_models
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


# ------------------------------------------------------------------------------------------------------------------ resnet


def _conv_of(weights: Weights, conv: str, norm: str) -> Params:
    kernel = weights[f"{conv}.weight"].transpose(2, 3, 1, 0)
    return {"kernel": kernel, "scale": weights[f"{norm}.weight"], "shift": weights[f"{norm}.bias"]}


def _statistics_of(weights: Weights, norm: str) -> Params:
    return {"mean": weights[f"{norm}.running_mean"], "variance": weights[f"{norm}.running_var"]}


def conv_norm(p: Params, running: Params, x_BYXC: jax.Array, stride: int = 1) -> tuple[jax.Array, Params]:
    """A convolution and batch norm; also the running statistics after it."""
    pad = p["kernel"].shape[0] // 2
    x_BYXC = jax.lax.conv_general_dilated(
        x_BYXC, p["kernel"], (stride, stride), [(pad, pad)] * 2, dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    mean_C = x_BYXC.mean((0, 1, 2))
    variance_C = jnp.square(x_BYXC).mean((0, 1, 2)) - jnp.square(mean_C)  # as Flax has it: in one pass
    count = x_BYXC.size // x_BYXC.shape[-1]
    new = {"mean": mean_C, "variance": variance_C * count / (count - 1)}
    running = jax.tree.map(lambda old, new: 0.9 * old + 0.1 * new, running, new)
    return (x_BYXC - mean_C) * (jax.lax.rsqrt(variance_C + 1e-5) * p["scale"]) + p["shift"], running


def residual(p: Params, running: Params, x_BYXC: jax.Array, stride: int) -> tuple[jax.Array, Params]:
    """Two convolutions around a shortcut, and the running statistics after them."""
    after: Params = {}
    inner, after["first"] = conv_norm(p["first"], running["first"], x_BYXC, stride)
    inner, after["second"] = conv_norm(p["second"], running["second"], jax.nn.relu(inner))
    if "shortcut" in p:
        x_BYXC, after["shortcut"] = conv_norm(p["shortcut"], running["shortcut"], x_BYXC, stride)
    return jax.nn.relu(inner + x_BYXC), after


def resnet(model: nn.Module, weights: Weights, rate: float) -> Model:
    """A ResNet of basic blocks. Its state are the running statistics."""
    strides = {name: block.conv1.stride[0] for name, block in model.named_children() if isinstance(block, zoo_models.Residual)}
    places: list[dict[str, tuple[str, str]]] = []
    for block in strides:
        places.append({"first": (f"{block}.conv1", f"{block}.norm1"), "second": (f"{block}.conv2", f"{block}.norm2")})
        if f"{block}.shortcut.0.weight" in weights:
            places[-1]["shortcut"] = (f"{block}.shortcut.0", f"{block}.shortcut.1")
    params = {
        "stem": _conv_of(weights, "0", "1"),
        "blocks": [{name: _conv_of(weights, *place) for name, place in own.items()} for own in places],
        "head": linear_of(weights, list(weights)[-1].removesuffix(".bias")),
    }
    running = {
        "stem": _statistics_of(weights, "1"),
        "blocks": [{name: _statistics_of(weights, norm) for name, (_, norm) in own.items()} for own in places],
    }

    def loss(params: Params, running: Params, x_BYXC: jax.Array, labels_B: jax.Array) -> tuple[jax.Array, Params]:
        x_BYXC, stem = conv_norm(params["stem"], running["stem"], x_BYXC)
        x_BYXC, blocks = jax.nn.relu(x_BYXC), []
        for p, own, stride in zip(params["blocks"], running["blocks"], strides.values(), strict=True):
            x_BYXC, own = residual(p, own, x_BYXC, stride)
            blocks.append(own)
        return cross_entropy(linear(params["head"], x_BYXC.mean((1, 2))), labels_B), {"stem": stem, "blocks": blocks}

    return Model(params, running, loss)


# ------------------------------------------------------------------------------------------------------------------ lstm


def _lstm_of(weights: Weights, layer: int) -> Params:
    names = {"input": "weight_ih", "hidden": "weight_hh", "input_bias": "bias_ih", "hidden_bias": "bias_hh"}
    return {name: weights[f"lstm.{key}_l{layer}"].T for name, key in names.items()}


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
        "layers": [_lstm_of(weights, layer) for layer in range(count)],
        "head": linear_of(weights, "last"),
    }

    def loss(params: Params, key: jax.Array, ids_BS: jax.Array) -> tuple[jax.Array, jax.Array]:
        key, *keys = jax.random.split(key, count)
        x_SBD = params["embedding"][ids_BS[:, :-1].T]
        for k, layer in enumerate(params["layers"]):
            x_SBD = lstm_layer(layer, dropout(x_SBD, rate, keys[k - 1]) if k else x_SBD)
        return cross_entropy(linear(params["head"], x_SBD), ids_BS[:, 1:].T), key

    return Model(params, jax.random.key(0), loss)


KINDS: dict[str, Callable[[nn.Module, Weights, float], Model]] = {
    "mlp": mlp,
    "resnet": resnet,
    "lstm": lstm,
    "bert": zoo_jax_text.bert,
    "gpt2": zoo_jax_text.gpt2,
    "llama": zoo_jax_text.llama,
}
