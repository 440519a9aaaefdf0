"""Putting adapters into a model: which layer adapts which, and what cannot have any."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from nxd_jax._wrapper import Wrapper
from nxd_jax.modules.lora.config import LoraConfig
from nxd_jax.modules.lora.layer import LoraConv2d, LoraEmbedding, LoraLayer, LoraLinear, is_conv_1d
from nxd_jax.modules.lora.tp_layer import LoraGQAQKVParallelLinear, LoraParallelConv2d, LoraParallelEmbedding, LoraParallelLinear
from nxd_jax.modules.moe.moe_parallel_layers import ExpertFusedLinear
from nxd_jax.tensor_parallel.conv import InputChannelParallelConv2d, OutputChannelParallelConv2d
from nxd_jax.tensor_parallel.embedding import ParallelEmbedding
from nxd_jax.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from nxd_jax.tensor_parallel.qkv_linear import GQAQKVColumnParallelLinear

ADAPTERS: dict[type[nn.Module], type[LoraLayer]] = {
    nn.Linear: LoraLinear,
    nn.Embedding: LoraEmbedding,
    nn.Conv2d: LoraConv2d,
    ColumnParallelLinear: LoraParallelLinear,
    RowParallelLinear: LoraParallelLinear,
    GQAQKVColumnParallelLinear: LoraGQAQKVParallelLinear,
    ParallelEmbedding: LoraParallelEmbedding,
    OutputChannelParallelConv2d: LoraParallelConv2d,
    InputChannelParallelConv2d: LoraParallelConv2d,
}
"""Which layer adapts which; transformers' Conv1D is a `LoraLinear`'s, too."""


def adapter(name: str, module: nn.Module, config: LoraConfig) -> LoraLayer:
    """The layer that takes a module's place. Raises ValueError for modules of other kinds, and as the layers do, naming the module."""
    kind = LoraLinear if is_conv_1d(module) else next((ADAPTERS[c] for c in type(module).__mro__ if c in ADAPTERS), None)
    if isinstance(module, ExpertFusedLinear):  # an adapter of the linear layer that it is, too, would be one for all experts
        kind = None
    if isinstance(module, NonDynamicallyQuantizableLinear):
        raise ValueError(
            f"LoraConfig: target_modules matches {name}, a part of torch.nn.MultiheadAttention, which uses its weight without calling it: an adapter "
            "would have no effect. Choose other modules, or attention with projections of its own"
        )
    if kind is None:
        known = ", ".join([*(c.__name__ for c in ADAPTERS), "transformers' Conv1D"])
        raise ValueError(
            f"LoraConfig: target_modules matches {name}, a {type(module).__name__}, which LoRA cannot adapt. It adapts {known}"
        )
    try:
        return kind(module, config)
    except (NotImplementedError, RuntimeError) as error:
        raise type(error)(f"{name}: {error}") from None


def check_model(module: object, config: LoraConfig) -> None:
    """Raise TypeError, ValueError or NotImplementedError for what cannot get adapters."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"LoraModel takes a torch.nn.Module, got {type(module).__name__}")
    if is_nxd_model(module):
        raise TypeError(
            "LoraModel takes the model inside an NxDModel: use get_lora_model(model, lora_config), which puts the adapters there"
        )
    if not config.enable_lora:
        raise ValueError("LoraModel with enable_lora=False: use the model itself, or get_lora_model, which then returns it")
    if any(isinstance(m, LoraLayer) for m in module.modules()):
        raise ValueError("the model has LoRA adapters already: merge_and_unload() them first, or make the model anew")
    if hasattr(type(module), "cut_pipeline_stage"):
        raise ValueError(
            "a pipeline's stages are cut from the model with its adapters: give NxDPPModel the LoraModel, or neuronx_distributed_config a lora_config"
        )


def is_nxd_model(module: object) -> bool:
    """Whether a model is what `initialize_parallel_model` returns."""
    return isinstance(module, Wrapper)


def check_trained(model: nn.Module, layers: Mapping[str, LoraLayer], names: Mapping[str, torch.Tensor], trained: Container[int]) -> None:
    """Raise ValueError for adapters none of whose parameters is among those that train (by id). names: of the model's parameters."""
    lost = [n for n, m in layers.items() if not any(id(p) in trained for f in (m.lora_A, m.lora_B) for p in f.parameters())]
    if lost:
        raise ValueError(
            f"LoRA: no parameter to train of the adapters of {', '.join(lost[:4])} is in the state dict of the {type(model).__name__}, which has "
            f"{', '.join(list(names)[:4]) or 'nothing'}: the two have different names. If it wraps another model, give LoraModel that one"
        )


def check_apart(adapted: Mapping[str, nn.Module], whole: Iterable[str]) -> None:
    """Raise ValueError for a module that would both get an adapter and train as it is."""
    for name in whole:
        inside = [n for n in adapted if n == name or n.startswith(f"{name}.")]
        if inside:
            raise ValueError(
                f"LoraConfig: {name} is one of modules_to_save, which train as they are, but target_modules gives {inside[0]} an adapter: choose one"
            )


# -- gradients through frozen embeddings -------------------------------------------------------------


class _Connect(torch.autograd.Function):
    """x, as something that depends on a parameter. It is a copy: models scale embeddings in place, which torch refuses for views of functions."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, root: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return None, None


def _connect(module: nn.Module, args: Any, out: object) -> Any:
    """Let a frozen embedding's result require a gradient: activation checkpointing skips the backward pass of layers none of whose inputs does."""
    if not module.training or not torch.is_grad_enabled() or not isinstance(out, torch.Tensor) or out.requires_grad:
        return out
    return _Connect.apply(out, torch.zeros((), dtype=out.dtype, device=out.device, requires_grad=True))


def connect_embeddings(model: nn.Module) -> None:
    """Let results of frozen embeddings require gradients."""
    for module in model.modules():
        if isinstance(module, (nn.Embedding, ParallelEmbedding)):
            module.register_forward_hook(_connect)
