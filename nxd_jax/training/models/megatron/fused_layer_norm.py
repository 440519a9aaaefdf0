"""`neuronx_distributed_training.models.megatron.fused_layer_norm`: norms over hidden states [..., hidden], computed in float32 on the device."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from nxd_jax.parallel_layers.layer_norm import LayerNorm
from nxd_jax.tensor_parallel.casting import wide_dtype
from nxd_jax.training.models.hf_models.layers import LlamaRMSNorm

__all__ = ["LayerNorm1P", "MixedFusedLayerNorm", "MixedFusedRMSNorm", "get_layer_norm", "norm"]


class MixedFusedLayerNorm(LayerNorm):
    """`torch.nn.LayerNorm`. sequence_parallel_enabled: the input is a part of the sequence, so gradients of all tensor-parallel ranks have to be added up."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return _normed(self, input, self.weight)


class LayerNorm1P(LayerNorm):
    """A layer norm that multiplies by 1 + its weight, which begins with zeros: weight decay draws it to no effect."""

    def reset_parameters(self) -> None:
        """Zeros."""
        for parameter in self.parameters(recurse=False):
            nn.init.zeros_(parameter)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return _normed(self, input, self.weight + 1)


class MixedFusedRMSNorm(LlamaRMSNorm):
    """x / sqrt(mean(x^2) + eps), in x's dtype times the weight."""


def get_layer_norm(
    hidden_size: int, eps: float = 1e-5, persist_layer_norm: bool = False, sequence_parallel: bool = False
) -> MixedFusedLayerNorm:
    """A layer norm. persist_layer_norm: accepted without effect."""
    return MixedFusedLayerNorm(hidden_size, eps, sequence_parallel_enabled=sequence_parallel)


def norm(kind: str, hidden_size: int, eps: float, sequence_parallel: bool) -> nn.Module:
    """The norm that `model.normalization` names: layernorm, layernorm1p or rmsnorm."""
    if kind == "rmsnorm":
        return MixedFusedRMSNorm(hidden_size, eps, sequence_parallel)
    made: Any = LayerNorm1P if kind == "layernorm1p" else MixedFusedLayerNorm
    found: nn.Module = made(hidden_size, eps, sequence_parallel_enabled=sequence_parallel)
    return found


def _normed(layer: LayerNorm, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = wide_dtype()
    return F.layer_norm(x.to(wide), layer.normalized_shape, weight.to(wide), layer.bias.to(wide), layer.eps).to(x.dtype)
