"""`neuronx_distributed_training.models.megatron.transformer`: the layers of Megatron GPT."""

from __future__ import annotations

import torch
from torch import nn

from nxd_jax.training.models.megatron.attention import CoreAttention, ParallelAttention
from nxd_jax.training.models.megatron.fused_layer_norm import norm
from nxd_jax.training.models.megatron.mlp import NeuronSwitchMLP, ParallelMLP
from nxd_jax.training.models.megatron.module import MegatronModule, RankDropout
from nxd_jax.training.models.megatron.options import GPTOptions

__all__ = [
    "CoreAttention",
    "NeuronSwitchMLP",
    "ParallelAttention",
    "ParallelMLP",
    "ParallelTransformer",
    "ParallelTransformerLayer",
]


class ParallelTransformerLayer(MegatronModule):
    """Attention and MLP, each added to what goes past it, by `transformer_block_type`:

        pre_ln      x + attention(norm(x)), then x + mlp(norm(x))
        post_ln     norm(x + attention(x)), then norm(x + mlp(x))
        normformer  x + norm(attention(norm(x))), then x + mlp(norm(x)), with a norm inside the MLP
        gpt_j       x + attention(norm(x)) + mlp(another norm(x))

    hidden_states: [length, batch, hidden], with sequence parallelism this rank's part of the length. Returns them as they came; a layer with experts and
    output_router_logits returns (hidden states, the router's logits). layer_number: from 1.
    """

    def __init__(self, options: GPTOptions, layer_number: int = 1):
        super().__init__()
        self.options = options
        self.layer_number = layer_number
        self.block = options.transformer_block_type
        self.has_experts = options.has_experts(layer_number)
        self.gives_logits = self.has_experts and options.output_router_logits
        self.input_layernorm = _norm(options)
        self.self_attention = ParallelAttention(options)
        self.post_attention_normformer_norm = _norm(options) if self.block == "normformer" else None
        self.post_attention_layernorm = _norm(options)
        self.mlp = NeuronSwitchMLP(options) if self.has_experts else ParallelMLP(options)
        self.hidden_dropout = RankDropout(options.hidden_dropout, by_rank=options.sequence_parallel)

    def forward(
        self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        x = hidden_states
        attended = self.self_attention(self._narrow(x if self.block == "post_ln" else self.input_layernorm(x)), attention_mask)
        if self.post_attention_normformer_norm is not None:
            attended = self.post_attention_normformer_norm(attended)
        added = x + self.hidden_dropout(attended)
        if self.block == "post_ln":
            added = self.input_layernorm(added)
        normed = added if self.block == "post_ln" else self.post_attention_layernorm(x if self.block == "gpt_j" else added)
        found = self.mlp(self._narrow(normed))
        out = added + self.hidden_dropout(found[0] if self.has_experts else found)
        if self.block == "post_ln":
            out = self.post_attention_layernorm(out)
        return (out, found[1]) if self.gives_logits else out

    def _narrow(self, x: torch.Tensor) -> torch.Tensor:
        """As linear layers take it, where what goes past them is float32."""
        return x.to(self.input_layernorm.weight.dtype) if self.options.fp32_residual_connection else x  # type: ignore[arg-type]


class ParallelTransformer(MegatronModule):
    """All layers and the last norm. Gives hidden states, and a list of the routers' logits [tokens, experts], one for each layer that gives them."""

    def __init__(self, options: GPTOptions):
        super().__init__()
        self.options = options
        self.layers = nn.ModuleList(ParallelTransformerLayer(options, k + 1) for k in range(options.num_layers))
        self.final_layernorm = None if options.transformer_block_type == "post_ln" else _norm(options)

    def forward(self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None = None) -> tuple[torch.Tensor, list[torch.Tensor]]:
        routed = []
        for layer in self.layers:
            found = layer(hidden_states, attention_mask)
            if layer.gives_logits:
                hidden_states, logits = found[0], found[1]
                routed.append(logits)
            else:
                hidden_states = found
        return hidden_states if self.final_layernorm is None else self.final_layernorm(hidden_states), routed


def _norm(options: GPTOptions) -> nn.Module:
    return norm(options.normalization, options.hidden_size, options.layernorm_epsilon, options.sequence_parallel)
