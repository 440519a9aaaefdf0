"""`neuronx_distributed_training.lightning_modules.model.hf_models.llama_model`: Llama from a YAML file."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import LlamaConfig

from nxd_jax.training.lightning_modules.model.hf_models.base_model import BaseHfModel
from nxd_jax.training.models.hf_models.modeling_llama import (
    ActivationMultiplyMLP,
    CoreAttention,
    LlamaDecoderLayer,
    LlamaForCausalLM,
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)

__all__ = [
    "ActivationMultiplyMLP",
    "CoreAttention",
    "HFLLamaModule",
    "LlamaDecoderLayer",
    "LlamaForCausalLM",
    "LlamaMLP",
    "LlamaRMSNorm",
    "LlamaRotaryEmbedding",
]


class HFLLamaModule(BaseHfModel):
    """Trains `LlamaForCausalLM`.

    With `activations_checkpoint_granularity: null` attention weights are computed again, unless flash attention never makes them.
    """

    config_class = LlamaConfig
    model_types = ("llama", "mistral")
    layer_class = LlamaDecoderLayer
    recompute_classes = (CoreAttention, LlamaDecoderLayer, LlamaRMSNorm, LlamaMLP, ActivationMultiplyMLP, LlamaRotaryEmbedding)

    def _recomputed_by_default(self) -> Any:
        return None if self._fusion("flash_attention") else (CoreAttention,)

    def model_provider_func(self, config: Any) -> nn.Module:
        return LlamaForCausalLM(config)
