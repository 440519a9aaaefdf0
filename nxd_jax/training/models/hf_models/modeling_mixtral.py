"""`neuronx_distributed_training.models.hf_models.modeling_mixtral`: Mixtral with parallel layers: Llama's, with experts in place of MLPs.

A model is made of a `transformers.MixtralConfig` with the attributes of `options.Options` and of `MoEOptions`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import nn

from nxd_jax.modules.moe import ExpertMLPs, MoE, RouterTopK, load_balancing_loss_func
from nxd_jax.training.models.hf_models.attention import CoreAttention, LlamaAttention
from nxd_jax.training.models.hf_models.layers import LlamaMLP, LlamaRMSNorm
from nxd_jax.training.models.hf_models.modeling_llama import CausalLMLoss, LlamaDecoderLayer, LlamaForCausalLM, LlamaModel, norm, refuse
from nxd_jax.training.models.hf_models.options import Options, normal_init
from nxd_jax.training.models.hf_models.rotary import LlamaRotaryEmbedding

__all__ = [
    "BalanceLoss",
    "CausalLMLoss",
    "CoreAttention",
    "LlamaMLP",
    "MixtralAttention",
    "MixtralDecoderLayer",
    "MixtralForCausalLM",
    "MixtralModel",
    "MixtralRMSNorm",
    "MixtralRotaryEmbedding",
    "MoE",
    "MoEOptions",
    "init_router",
    "initialize_mixtral_moe_layer",
]


@dataclasses.dataclass(frozen=True)
class MoEOptions:
    """Attributes that a configuration gets for experts.

    moe_frequency: every how manieth layer has experts, from the first on; others have an MLP. capacity_factor: an expert takes at most so many times the tokens
    that each would get if all were equally busy; 0 and None: all tokens (dropless). normalize_top_k_affinities: weights of a token's experts add up to 1; by
    default if it has several. token_shuffle_group_size: data-parallel ranks that mix their tokens first.
    """

    moe_frequency: int = 1
    capacity_factor: float | None = 1.0
    normalize_top_k_affinities: bool = True
    token_shuffle_group_size: int = 1

    @classmethod
    def of(cls, config: Any) -> MoEOptions:
        """Those of a configuration."""
        given = {f.name: getattr(config, f.name) for f in dataclasses.fields(cls) if hasattr(config, f.name)}
        given.setdefault("normalize_top_k_affinities", config.num_experts_per_tok > 1)
        return cls(**given)


class MixtralRMSNorm(LlamaRMSNorm):
    """Mixtral's norm is Llama's."""


class MixtralRotaryEmbedding(LlamaRotaryEmbedding):
    """Mixtral's rotary embedding is Llama's."""


class MixtralAttention(LlamaAttention):
    """Mixtral's attention is Llama's, within `sliding_window` if the configuration has one."""

    def _rotary(self) -> nn.Module:
        return MixtralRotaryEmbedding(self.config)


def init_router(linear: nn.Linear, std: float) -> None:
    """Fill a router's weights. It draws as often as making the layer did, so that models made on the meta device are the same."""
    linear.reset_parameters()
    nn.init.normal_(linear.weight, std=std)


def initialize_mixtral_moe_layer(config: Any) -> MoE:
    """Router and experts in place of an MLP. It gives (output, the router's logits [tokens, experts])."""
    options, moe = Options.of(config), MoEOptions.of(config)
    size = config.num_local_experts, config.num_experts_per_tok, config.hidden_size
    jitter = float(getattr(config, "router_jitter_noise", 0.0) or 0.0)
    router = RouterTopK(*size, dtype=options.params_dtype, jitter_eps=jitter)
    nn.init.normal_(router.linear_router.weight, std=config.initializer_range)
    experts = ExpertMLPs(
        *size,
        config.intermediate_size,
        config.hidden_act,
        glu_mlp=True,
        capacity_factor=moe.capacity_factor,
        normalize_top_k_affinities=moe.normalize_top_k_affinities,
        init_method=normal_init(config),
        output_layer_init_method=normal_init(config),
        dtype=options.params_dtype,
        sequence_parallel_enabled=options.sequence_parallel_enabled,
    )
    return MoE(
        router,
        experts,
        sequence_parallel_enabled=options.sequence_parallel_enabled,
        sequence_dimension=0 if options.sequence_parallel_enabled else None,
        return_router_logits=True,
        token_shuffle_group_size=moe.token_shuffle_group_size,
    )


class MixtralDecoderLayer(LlamaDecoderLayer):
    """Llama's layer with experts; with an MLP where `moe_frequency` says so. Gives hidden states, with experts (hidden states, the router's logits)."""

    def __init__(self, config: Any, layer_index: int = 0):
        super().__init__(config, layer_index)
        self.has_experts = has_experts(config, layer_index)

    def _attention(self, config: Any) -> nn.Module:
        return MixtralAttention(config)

    def _mlp(self, config: Any, layer_index: int) -> nn.Module:
        return initialize_mixtral_moe_layer(config) if has_experts(config, layer_index) else LlamaMLP(config)

    def _norm(self, config: Any) -> nn.Module:
        return norm(config, MixtralRMSNorm)

    def forward(  # type: ignore[override]
        self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None = None, position_ids: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        if not self.has_experts:
            return super().forward(hidden_states, attention_mask, position_ids)
        hidden_states = hidden_states + self.self_attn(self.input_layernorm(hidden_states), attention_mask, position_ids)
        out, logits = self.mlp(self.post_attention_layernorm(hidden_states))
        return hidden_states + out, logits


def has_experts(config: Any, layer_index: int) -> bool:
    """Whether a layer has experts."""
    return layer_index % MoEOptions.of(config).moe_frequency == 0


class MixtralModel(LlamaModel):
    """Gives hidden states, and a list of the routers' logits [tokens, experts], one for each layer with experts."""

    def make_layer(self, config: Any, index: int) -> nn.Module:
        return MixtralDecoderLayer(config, index)

    def make_norm(self, config: Any) -> nn.Module:
        return norm(config, MixtralRMSNorm)

    def forward(  # type: ignore[override]
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None, position_ids: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        hidden_states = self.embed_tokens(input_ids)
        routed = []
        for layer in self.layers:
            found = layer(hidden_states, attention_mask, position_ids)
            if layer.has_experts:
                hidden_states, logits = found[0], found[1]
                routed.append(logits)
            else:
                hidden_states = found
        return self.norm(hidden_states), routed


class BalanceLoss(nn.Module):
    """How unevenly experts are used, of the logits [tokens, experts] of all layers' routers one below the other: 1.0 if all get the same.

    It is what transformers calls the auxiliary loss divided by the number of experts of a token, as in upstream: a `router_aux_loss_coef` is that many times
    weaker than there.
    """

    def __init__(self, num_experts: int, top_k: int):
        super().__init__()
        self.num_experts, self.top_k = num_experts, top_k

    def forward(self, router_logits: torch.Tensor) -> torch.Tensor:
        return load_balancing_loss_func(router_logits, self.num_experts, self.top_k)


class MixtralForCausalLM(LlamaForCausalLM):
    """`LlamaForCausalLM` with experts: forward returns (loss, auxiliary loss, logits, router logits [layers * tokens, experts]), without labels no loss.

    The loss has `router_aux_loss_coef` times the auxiliary loss (`BalanceLoss`) of this rank's tokens in it. Without `output_router_logits` there is neither
    an auxiliary loss nor router logits: (loss, logits).
    """

    def __init__(self, config: Any):
        super().__init__(config)
        self.router_aux_loss_coef = config.router_aux_loss_coef
        self.balance_loss = BalanceLoss(config.num_local_experts, config.num_experts_per_tok)

    def make_model(self, config: Any) -> nn.Module:
        return MixtralModel(config)

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        output_router_logits: bool | None = None,
    ) -> tuple[torch.Tensor, ...]:
        refuse(
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
            return_dict=return_dict,
        )
        hidden_states, routed = self.model(input_ids, attention_mask, position_ids)
        logits = self.logits(hidden_states)
        loss = None if labels is None else self.causal_loss(logits, labels)
        if not (self.config.output_router_logits if output_router_logits is None else output_router_logits):
            return (logits,) if loss is None else (loss, logits)
        router_logits = torch.cat(routed)
        balance = self.balance_loss(router_logits)
        if loss is None:
            return balance, logits, router_logits
        return loss + self.router_aux_loss_coef * balance, balance, logits, router_logits
