"""Networks of convolutions of `zoo.py` in JAX: ResNet, MobileNet and ConvNeXt.

Shape suffixes: B batch, Y and X height and width, C channels. Kernels are [height, width, in, out].
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import zoo_models
from torch import nn
from zoo_jax_text import Model, Params, Weights, cross_entropy, layer_norm, linear, linear_of, norm_of


def _kernel_of(weights: Weights, conv: str) -> np.ndarray:
    return weights[f"{conv}.weight"].transpose(2, 3, 1, 0)


def _conv_of(weights: Weights, conv: str, norm: str) -> Params:
    return {"kernel": _kernel_of(weights, conv), "scale": weights[f"{norm}.weight"], "shift": weights[f"{norm}.bias"]}


def _statistics_of(weights: Weights, norm: str) -> Params:
    return {"mean": weights[f"{norm}.running_mean"], "variance": weights[f"{norm}.running_var"]}


def conv(kernel: jax.Array, x_BYXC: jax.Array, stride: int, pad: int) -> jax.Array:
    """A convolution; a kernel of one input channel is of each channel alone."""
    groups = x_BYXC.shape[-1] // kernel.shape[2]
    return jax.lax.conv_general_dilated(
        x_BYXC, kernel, (stride, stride), [(pad, pad)] * 2, dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=groups
    )


def conv_norm(p: Params, running: Params, x_BYXC: jax.Array, stride: int = 1) -> tuple[jax.Array, Params]:
    """A convolution and batch norm; also the running statistics after it."""
    pad = p["kernel"].shape[0] // 2
    x_BYXC = conv(p["kernel"], x_BYXC, stride, pad)
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


def mobilenet(model: nn.Module, weights: Weights, rate: float) -> Model:
    """A MobileNetV2. Its state are the running statistics."""
    blocks = {name: block for name, block in model.named_children() if isinstance(block, zoo_models.InvertedResidual)}
    places = [[(f"{name}.parts.{k}", f"{name}.parts.{k + 1}") for k in (0, 3, 6)] for name in blocks]
    shapes = [(block.parts[3].stride[0], block.same) for block in blocks.values()]
    params = {
        "stem": _conv_of(weights, "0", "1"),
        "blocks": [[_conv_of(weights, *place) for place in own] for own in places],
        "head": linear_of(weights, list(weights)[-1].removesuffix(".bias")),
    }
    running = {"stem": _statistics_of(weights, "1"), "blocks": [[_statistics_of(weights, norm) for _, norm in own] for own in places]}

    def block(p: list[Params], running: list[Params], x_BYXC: jax.Array, stride: int, same: bool) -> tuple[jax.Array, list[Params]]:
        wide, first = conv_norm(p[0], running[0], x_BYXC)
        deep, second = conv_norm(p[1], running[1], jax.nn.relu6(wide), stride)
        out, third = conv_norm(p[2], running[2], jax.nn.relu6(deep))
        return x_BYXC + out if same else out, [first, second, third]

    def loss(params: Params, running: Params, x_BYXC: jax.Array, labels_B: jax.Array) -> tuple[jax.Array, Params]:
        x_BYXC, stem = conv_norm(params["stem"], running["stem"], x_BYXC)
        x_BYXC, after = jax.nn.relu6(x_BYXC), []
        for p, own, shape in zip(params["blocks"], running["blocks"], shapes, strict=True):
            x_BYXC, own = block(p, own, x_BYXC, *shape)
            after.append(own)
        return cross_entropy(linear(params["head"], x_BYXC.mean((1, 2))), labels_B), {"stem": stem, "blocks": after}

    return Model(params, running, loss)


def convnext(model: nn.Module, weights: Weights, rate: float) -> Model:
    """A ConvNeXt."""

    def conv_of(name: str) -> Params:
        return {"kernel": _kernel_of(weights, name), "bias": weights[f"{name}.bias"]}

    layers = []
    for name, module in model.named_children():
        if isinstance(module, zoo_models.ConvNeXtBlock):
            own = {"up": linear_of(weights, f"{name}.mlp.0"), "down": linear_of(weights, f"{name}.mlp.2")}
            own |= {"depthwise": conv_of(f"{name}.depthwise"), "norm": norm_of(weights, f"{name}.norm"), "scale": weights[f"{name}.scale"]}
            layers.append(own)
        elif isinstance(module, nn.Conv2d):
            layers.append({"downsample": conv_of(name)})
    params = {"layers": layers, "head": linear_of(weights, list(weights)[-1].removesuffix(".bias"))}

    def block(p: Params, x_BYXC: jax.Array) -> jax.Array:
        inner = layer_norm(p["norm"], conv(p["depthwise"]["kernel"], x_BYXC, 1, 3) + p["depthwise"]["bias"], 1e-5)
        return x_BYXC + p["scale"] * linear(p["down"], jax.nn.gelu(linear(p["up"], inner), approximate=False))

    def loss(params: Params, state: None, x_BYXC: jax.Array, labels_B: jax.Array) -> tuple[jax.Array, None]:
        for p in params["layers"]:
            x_BYXC = conv(p["downsample"]["kernel"], x_BYXC, 2, 0) + p["downsample"]["bias"] if "downsample" in p else block(p, x_BYXC)
        return cross_entropy(linear(params["head"], x_BYXC.mean((1, 2))), labels_B), None

    return Model(params, None, loss)


KINDS = {"resnet": resnet, "mobilenet": mobilenet, "convnext": convnext}
