"""`neuronx_distributed_training.lightning_modules.model.hf_models.mixtral_model`: Mixtral from a YAML file."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import MixtralConfig

from nxd_jax.modules.moe import MoE, load
from nxd_jax.modules.moe.moe_config_validator import MoeConfigValidator
from nxd_jax.training.config.loading import plain
from nxd_jax.training.lightning_modules.model.hf_models.base_model import BaseHfModel
from nxd_jax.training.models.hf_models.modeling_mixtral import (
    BalanceLoss,
    CoreAttention,
    LlamaMLP,
    MixtralDecoderLayer,
    MixtralForCausalLM,
    MixtralRMSNorm,
    MixtralRotaryEmbedding,
    init_router,
)

__all__ = [
    "CoreAttention",
    "HFMixtralModule",
    "LlamaMLP",
    "MixtralDecoderLayer",
    "MixtralForCausalLM",
    "MixtralRMSNorm",
    "MixtralRotaryEmbedding",
    "MoE",
]


class HFMixtralModule(BaseHfModel):
    """Trains `MixtralForCausalLM`. `model.moe` says how many experts there are, and which tokens they take; what it leaves out is as in config.json."""

    config_class = MixtralConfig
    model_types = ("mixtral", "mistral", "llama")
    layer_class = MixtralDecoderLayer
    recompute_classes = (CoreAttention, MixtralDecoderLayer, MixtralRMSNorm, MixtralRotaryEmbedding, LlamaMLP, MoE)

    def _hf_config(self) -> Any:
        config = super()._hf_config()
        moe = dict(plain(self.config.model.get("moe") or {}))
        config.capacity_factor = _capacity_factor(moe, config.hidden_act)
        config.num_local_experts = int(moe.get("num_experts", config.num_local_experts))
        config.num_experts_per_tok = top_k = int(moe.get("top_k", config.num_experts_per_tok))
        config.moe_frequency = int(moe.get("frequency", 1))
        config.attention_dropout = float(moe.get("dropout", 0.0))
        config.output_router_logits = bool(moe.get("output_router_logits", True))
        config.router_aux_loss_coef = float(moe.get("router_aux_loss_coef", 0.02))
        config.normalize_top_k_affinities = bool(moe.get("normalize_top_k_affinities", top_k > 1))
        config.token_shuffle_group_size = self._size("token_shuffle_group_size")
        _check(moe, config)
        self.output_loss_value_spec = (True, False, False, False) if config.output_router_logits else (True, False)
        return config

    def build_model(self) -> Any:
        """The model, which counts what its experts get from now on (`load_log`)."""
        made = super().build_model()
        self.load_log = load.LoadLog(made)
        return made

    def logits(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """The model's; preferences have no loss of balance."""
        found: torch.Tensor = self.model(input_ids=input_ids, attention_mask=attention_mask, output_router_logits=False)[0]
        return found

    def step_metrics(self) -> dict[str, Any]:
        """moe/imbalance, moe/dropped_share, moe/idle_experts: see `modules.moe.load.LoadLog`. (The original logs nothing of the kind.)"""
        return self.load_log.step(by_layer=False)

    def _max_positions(self, config: Any) -> int:
        return max(super()._max_positions(config), config.max_position_embeddings)

    def _leaves(self) -> list[str]:
        return [*super()._leaves(), BalanceLoss.__name__]

    def model_provider_func(self, config: Any) -> nn.Module:
        return MixtralForCausalLM(config)

    def init_weights(self, module: nn.Module, device: Any = None) -> None:
        if isinstance(module, nn.Linear):
            init_router(module, self.model_config.initializer_range)
        else:
            super().init_weights(module, device)


def _capacity_factor(moe: dict[str, Any], activation: str) -> float | None:
    """0 for dropless, else `capacity_factor` (1.0; null: no token is dropped). Raises ValueError for what cannot be."""
    moe.setdefault("capacity_factor", 0.0 if moe.get("dropless", False) else 1.0)
    MoeConfigValidator({"model": {"moe": moe}}).validate_moe_config()
    if moe.get("dropless", False) and activation != "silu":
        raise ValueError(
            f"model.moe.dropless=True needs hidden_act silu in config.json, got {activation!r}: set dropless=False with a capacity_factor"
        )
    factor = moe.get("capacity_factor")
    return None if factor is None else float(factor)


def _check(moe: dict[str, Any], config: Any) -> None:
    if not moe.get("glu_mlp", True):
        raise ValueError("model.moe.glu_mlp=False: Mixtral's experts are gated; leave it True")
    if moe.get("routing_algorithm", "top_k") != "top_k":
        raise ValueError(f"model.moe.routing_algorithm={moe['routing_algorithm']!r}: Mixtral's router takes the best experts, top_k")
    if config.moe_frequency < 1:
        raise ValueError(f"model.moe.frequency={config.moe_frequency} must be 1 or more: every how manieth layer has experts")
    if not 1 <= config.num_experts_per_tok <= config.num_local_experts:
        raise ValueError(
            f"model.moe.top_k={config.num_experts_per_tok} must be in 1..{config.num_local_experts}, the number of experts (num_experts)"
        )
