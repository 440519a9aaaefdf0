"""Attention of Megatron GPT, whose hidden states are [length, batch, hidden].

as many K/V heads as heads    query_key_value.weight: for each head its q, k and v
fewer K/V heads               query.weight: head by head; key_value.weight: for each K/V head its k and v
"""

from __future__ import annotations

import torch

from nxd_jax.tensor_parallel import parallel_groups
from nxd_jax.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from nxd_jax.tensor_parallel.random import get_xla_rng_tracker
from nxd_jax.training.models.hf_models import attention as hf_attention
from nxd_jax.training.models.megatron.module import MegatronModule
from nxd_jax.training.models.megatron.options import GPTOptions
from nxd_jax.training.models.megatron.rotary_pos_embedding import RotaryEmbedding, apply_rotary_pos_emb


class CoreAttention(hf_attention.CoreAttention):
    """What lies between the projections: rotary embedding, softmax(q k^T / sqrt(head_dim)), dropout, v. It has no weights; selective recomputation is for it.

    forward(query [length, batch, heads, head_dim], key and value [length, batch, K/V heads, head_dim], attention_mask) returns
    [length, batch, heads * head_dim]. A token sees itself and what is before it, within `sliding_window` if there is one (the original sees everything then).
    attention_mask is ignored, as in the original. Dropout draws on each tensor-parallel rank its own numbers: ranks have different heads.
    """

    def __init__(self, options: GPTOptions):
        super().__init__(options.sliding_window, options.attention_dropout)
        self.rotary_emb = _rotary(options) if options.position_embedding_type == "rope" else None

    def forward(
        self,
        query_layer: torch.Tensor,
        key_layer: torch.Tensor,
        value_layer: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query_layer, key_layer, value_layer))
        if self.rotary_emb is not None:
            cos, sin = self.rotary_emb(v)
            q, k = apply_rotary_pos_emb(q, k, cos, sin)
        group = q.shape[1] // k.shape[1]
        if group > 1:
            k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
        return super().forward(q, k, v).permute(2, 0, 1, 3).flatten(2)

    def _dropped(self, weights: torch.Tensor) -> torch.Tensor:
        if not self.training or self.dropout == 0:
            return weights
        with get_xla_rng_tracker().fork():
            return super()._dropped(weights)


class ParallelAttention(MegatronModule):
    """Attention of a rank's heads. hidden_states and the result: [length, batch, hidden], with sequence parallelism this rank's part of the length."""

    def __init__(self, options: GPTOptions):
        super().__init__()
        self.options = options
        tp, q, kv = parallel_groups.size("tp"), options.num_attention_heads * options.head_dim, options.kv_heads * options.head_dim
        self.heads, self.kv_heads = options.num_attention_heads // tp, options.kv_heads // tp
        self.use_gqa = options.kv_heads != options.num_attention_heads
        layout = {"gather_output": False, **options.linear()}
        if self.use_gqa:
            self.query = ColumnParallelLinear(options.hidden_size, q, **layout)
            self.key_value = ColumnParallelLinear(options.hidden_size, 2 * kv, **layout)
        else:
            self.query_key_value = ColumnParallelLinear(options.hidden_size, 3 * q, **layout)
        self.core_attention = CoreAttention(options)
        self.dense = RowParallelLinear(q, options.hidden_size, input_is_parallel=True, **options.linear(output=True))

    def forward(self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        if self.use_gqa:
            query = self.query(hidden_states).unflatten(-1, (self.heads, -1))
            key, value = self.key_value(hidden_states).unflatten(-1, (self.kv_heads, -1)).chunk(2, dim=-1)
        else:
            query, key, value = self.query_key_value(hidden_states).unflatten(-1, (self.heads, -1)).chunk(3, dim=-1)
        found: torch.Tensor = self.dense(self.core_attention(query, key, value, attention_mask))
        return found


def _rotary(options: GPTOptions) -> RotaryEmbedding:
    return RotaryEmbedding(
        options.head_dim,
        base=options.position_freq_base,
        position_interpolation_factor=options.position_interpolation_factor,
        position_abf_factor=options.position_abf_factor,
        rotary_percentage=options.rotary_percentage,
    )
