"""`neuronx_distributed_training.models.hf_models.modeling_llama`: Llama with parallel layers.

A model is made of a `transformers.LlamaConfig` with the attributes of `options.Options`. It is written from one rank's point of view: a rank's share of the
heads, of the MLP and of the vocabulary. Names of parameters are upstream's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from nxd_jax.tensor_parallel.casting import wide_dtype
from nxd_jax.tensor_parallel.embedding import ParallelEmbedding
from nxd_jax.tensor_parallel.linear import ColumnParallelLinear
from nxd_jax.training.models.hf_models.attention import CoreAttention, LlamaAttention
from nxd_jax.training.models.hf_models.layers import ActivationMultiplyMLP, LlamaMLP, LlamaRMSNorm
from nxd_jax.training.models.hf_models.loss import CausalLMLoss
from nxd_jax.training.models.hf_models.options import Options, normal_init, per_rank
from nxd_jax.training.models.hf_models.rotary import LlamaRotaryEmbedding

__all__ = [
    "ActivationMultiplyMLP",
    "CausalLMLoss",
    "CoreAttention",
    "LlamaAttention",
    "LlamaDecoderLayer",
    "LlamaForCausalLM",
    "LlamaMLP",
    "LlamaModel",
    "LlamaRMSNorm",
    "LlamaRotaryEmbedding",
]


class LlamaDecoderLayer(nn.Module):
    """Attention and MLP, each added to what goes past it. Gives hidden states as they came. layer_index: for layers that differ."""

    def __init__(self, config: Any, layer_index: int = 0):
        super().__init__()
        self.hidden_size = config.hidden_size
        self.self_attn = self._attention(config)
        self.mlp = self._mlp(config, layer_index)
        self.input_layernorm = self._norm(config)
        self.post_attention_layernorm = self._norm(config)

    def _attention(self, config: Any) -> nn.Module:
        return LlamaAttention(config)

    def _mlp(self, config: Any, layer_index: int) -> nn.Module:
        return LlamaMLP(config)

    def _norm(self, config: Any) -> nn.Module:
        return norm(config)

    def forward(
        self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None = None, position_ids: torch.Tensor | None = None
    ) -> torch.Tensor:
        hidden_states = hidden_states + self.self_attn(self.input_layernorm(hidden_states), attention_mask, position_ids)
        found: torch.Tensor = hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))
        return found


def norm(config: Any, kind: type[LlamaRMSNorm] = LlamaRMSNorm) -> LlamaRMSNorm:
    """A norm over hidden states."""
    options = Options.of(config)
    return kind(config.hidden_size, config.rms_norm_eps, options.sequence_parallel_enabled, options.params_dtype)


class LlamaModel(nn.Module):
    """Hidden states of token ids [batch, length]; with sequence parallelism this rank's part of [length, batch, hidden].

    Models with other layers override `make_layer` and `make_norm`.
    """

    def __init__(self, config: Any):
        super().__init__()
        self.config = config
        options = Options.of(config)
        per_rank(config, "vocab_size")
        self.embed_tokens = ParallelEmbedding(
            config.vocab_size,
            config.hidden_size,
            config.pad_token_id,
            init_method=normal_init(config),
            dtype=options.params_dtype,
            sequence_parallel_enabled=options.sequence_parallel_enabled,
        )
        self.layers = nn.ModuleList(self.make_layer(config, index) for index in range(config.num_hidden_layers))
        self.norm = self.make_norm(config)

    def make_layer(self, config: Any, index: int) -> nn.Module:
        return LlamaDecoderLayer(config, index)

    def make_norm(self, config: Any) -> nn.Module:
        return norm(config)

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None, position_ids: torch.Tensor | None = None
    ) -> torch.Tensor:
        hidden_states = self.embed_tokens(input_ids)
        for layer in self.layers:
            hidden_states = layer(hidden_states, attention_mask, position_ids)
        found: torch.Tensor = self.norm(hidden_states)
        return found


class LlamaForCausalLM(nn.Module):
    """forward(input_ids [batch, length], attention_mask, labels) returns (loss, logits [batch, length, vocabulary / tp]), or (logits,) without labels.

    labels: token ids at their own places, with -100 for those that do not count; with context parallelism shifted and cut, as
    `get_batch_on_this_context_parallel_rank` does it. attention_mask is ignored (`LlamaAttention`). Logits are float32 on the device.
    `tie_word_embeddings`: the head is the embedding. Raises NotImplementedError for what generates text: caches, outputs of every layer.
    """

    def __init__(self, config: Any):
        super().__init__()
        self.config = config
        self.options = options = Options.of(config)
        self.model = self.make_model(config)
        self.vocab_size = config.vocab_size
        self.lm_head = ColumnParallelLinear(
            config.hidden_size, config.vocab_size, bias=False, gather_output=False, **options.linear(config)
        )
        self.causal_loss = CausalLMLoss()
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.get_parameter("embed_tokens.weight")

    def make_model(self, config: Any) -> nn.Module:
        return LlamaModel(config)

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
    ) -> tuple[torch.Tensor, ...]:
        refuse(
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
            return_dict=return_dict,
        )
        logits = self.logits(self.model(input_ids, attention_mask, position_ids))
        return (logits,) if labels is None else (self.causal_loss(logits, labels), logits)

    def logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[batch, length, vocabulary / tp]."""
        found = self.lm_head(hidden_states).to(wide_dtype())
        return found.transpose(0, 1).contiguous() if self.options.sequence_parallel_enabled else found


def refuse(**given: Any) -> None:
    """Raise NotImplementedError for options that these models do not have."""
    asked = [name for name, value in given.items() if value is not None and value is not False]
    if asked:
        raise NotImplementedError(
            f"{', '.join(asked)}: this model trains on token ids and returns tuples, it has no key-value cache; leave {'it' if len(asked) == 1 else 'them'} out"
        )
