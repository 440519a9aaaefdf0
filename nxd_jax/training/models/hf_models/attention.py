"""Attention of Llama and Mixtral: causal, with grouped queries.

The projections of the input are one of three, by the names that upstream's checkpoints have:

    fuse_qkv, as many K/V heads as heads, no qkv_linear    qkv_proj.weight: q, k and v one below the other, each shared out by itself (stride 3)
    qkv_linear, or copies of K/V heads                     qkv_proj.weight_qkv with fuse_qkv, else qkv_proj.weight_q, .weight_k, .weight_v
    else                                                   q_proj.weight, k_proj.weight, v_proj.weight
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from nxd_jax.kernels import nki_flash_attn_func, nki_ring_attn_func
from nxd_jax.tensor_parallel import kv_groups, parallel_groups
from nxd_jax.tensor_parallel.casting import wide_dtype
from nxd_jax.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from nxd_jax.tensor_parallel.qkv_linear import GQAQKVColumnParallelLinear
from nxd_jax.training.models.hf_models.options import Options, per_rank, say_once
from nxd_jax.training.models.hf_models.rotary import LlamaRotaryEmbedding, rotate


class CoreAttention(nn.Module):
    """softmax(q k^T / sqrt(head_dim)) v of [batch, heads, length, head_dim]; each token sees itself and what is before it.

    sliding_window: only that many tokens back, itself included. dropout: of the weights, in training; tensor-parallel ranks draw alike. The softmax is computed
    in float32.
    """

    def __init__(self, sliding_window: int | None = None, dropout: float = 0.0):
        super().__init__()
        self.sliding_window = sliding_window
        self.dropout = dropout

    def forward(
        self, query_states: torch.Tensor, key_states: torch.Tensor, value_states: torch.Tensor, documents: torch.Tensor | None = None
    ) -> torch.Tensor:
        """documents: [batch, length], the number of each token's document; a token sees its own alone."""
        scores = query_states @ key_states.transpose(-1, -2) / math.sqrt(query_states.shape[-1])
        hidden = self._hidden(scores)
        if documents is not None:
            hidden = hidden | (documents[:, None, :, None] != documents[:, None, None, :])
        weights = scores.to(wide_dtype()).masked_fill(hidden, -math.inf).softmax(-1).to(value_states.dtype)
        return self._dropped(weights) @ value_states

    def _dropped(self, weights: torch.Tensor) -> torch.Tensor:
        return F.dropout(weights, self.dropout, self.training)

    def _hidden(self, scores: torch.Tensor) -> torch.Tensor:
        """True [length, length] where a token (row) does not see another."""
        every = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device)
        later = every.triu(1)
        return later if self.sliding_window is None else later | every.tril(-self.sliding_window)


class LlamaAttention(nn.Module):
    """Attention of a rank's heads. hidden_states: [batch, length, hidden], or [length / tp, batch, hidden] with sequence parallelism.

    config: transformers' configuration with the attributes of `Options`. `attention_bias`: projections have biases. `head_dim`: default hidden / heads.
    Where K/V heads do not divide by the ranks and no number of copies was asked for, the smallest that works is taken, and logged once.

    forward(hidden_states, attention_mask, position_ids): attention_mask is ignored, as upstream does: attention is causal, padding at the end is seen only by
    padding. With `Options.separate_documents` position_ids [batch, length] say where documents begin. Raises ValueError for heads that cannot be shared out.
    """

    def __init__(self, config: Any):
        super().__init__()
        self.config = config
        self.options = options = Options.of(config)
        self.head_dim = head_dim(config)
        self.kv_copies = kv_copies(config)
        self.num_heads = per_rank(config, "num_attention_heads")
        self.num_key_value_heads = config.num_key_value_heads * self.kv_copies // parallel_groups.size("tp")
        self.num_key_value_groups = self.num_heads // self.num_key_value_heads
        self._make_projections(bool(getattr(config, "attention_bias", False)))
        self.rotary_emb = self._rotary()
        self.dropout = float(getattr(config, "attention_dropout", 0.0) or 0.0)
        self.core_attn = CoreAttention(getattr(config, "sliding_window", None), self.dropout)
        if options.use_ring_attention and options.use_flash_attention:
            raise ValueError(
                "fusions.flash_attention and fusions.ring_attention are both True: ring attention is blockwise itself, switch flash_attention off"
            )

    def _rotary(self) -> nn.Module:
        return LlamaRotaryEmbedding(self.config)

    def _make_projections(self, bias: bool) -> None:
        config, layout = self.config, self.options.linear(self.config)
        hidden, q, kv = config.hidden_size, config.num_attention_heads * self.head_dim, config.num_key_value_heads * self.head_dim
        self.stacked = False
        if self.options.qkv_linear or self.kv_copies > 1:
            self.qkv_proj: nn.Module = GQAQKVColumnParallelLinear(
                hidden,
                [q, kv],
                bias=bias,
                gather_output=False,
                kv_size_multiplier=self.kv_copies,
                fuse_qkv=self.options.fuse_qkv,
                **layout,
            )
        elif self.options.fuse_qkv and q == kv:
            self.stacked = True
            self.qkv_proj = ColumnParallelLinear(hidden, 3 * q, bias=bias, stride=3, gather_output=False, **layout)
        else:
            for name, size in (("q_proj", q), ("k_proj", kv), ("v_proj", kv)):
                self.add_module(name, ColumnParallelLinear(hidden, size, bias=bias, gather_output=False, **layout))
        self.o_proj = RowParallelLinear(q, hidden, bias=bias, input_is_parallel=True, **layout)

    def forward(
        self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None = None, position_ids: torch.Tensor | None = None
    ) -> torch.Tensor:
        q, k, v = self._projected(hidden_states)
        q, k, v = self._heads(q, self.num_heads), self._heads(k, self.num_key_value_heads), self._heads(v, self.num_key_value_heads)
        cos, sin = self.rotary_emb(v, position_ids)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        k, v = (x.repeat_interleave(self.num_key_value_groups, dim=1) for x in (k, v))
        out = self._attend(q, k, v, self._documents(position_ids))
        out = out.permute(2, 0, 1, 3) if self.options.sequence_parallel_enabled else out.transpose(1, 2)
        found: torch.Tensor = self.o_proj(out.reshape(*out.shape[:2], self.num_heads * self.head_dim))
        return found

    def _projected(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if self.stacked:
            return self.qkv_proj(x).split(self.num_heads * self.head_dim, dim=-1)
        if hasattr(self, "qkv_proj"):
            return self.qkv_proj(x)
        return tuple(getattr(self, name)(x) for name in ("q_proj", "k_proj", "v_proj"))

    def _heads(self, x: torch.Tensor, count: int) -> torch.Tensor:
        """[batch, count, length, head_dim]."""
        x = x.view(*x.shape[:2], count, self.head_dim)
        return x.permute(1, 2, 0, 3) if self.options.sequence_parallel_enabled else x.transpose(1, 2)

    def _documents(self, position_ids: torch.Tensor | None) -> torch.Tensor | None:
        """The number of each token's document, where rows hold several."""
        if not self.options.separate_documents or position_ids is None:
            return None
        if parallel_groups.size("cp") > 1:
            raise ValueError(
                f"separate_documents with context_parallel_size={parallel_groups.size('cp')}: ring attention is causal only. Set context_parallel_size=1, or "
                "separate_documents to False"
            )
        return (position_ids == 0).cumsum(-1)

    def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, documents: torch.Tensor | None = None) -> torch.Tensor:
        dropout = self.dropout if self.training else 0.0
        window, length = getattr(self.config, "sliding_window", None), q.shape[-2] * parallel_groups.size("cp")
        windowed = window is not None and window < length
        if parallel_groups.size("cp") > 1:
            self._check_ring(window if windowed else None)
            return nki_ring_attn_func(q, k, v, None, None, dropout_p=dropout)
        if not (self.options.use_flash_attention or self.options.use_ring_attention):
            return self.core_attn(q, k, v, documents)
        if documents is not None:
            say_once("separate_documents: attention is computed without fusions.flash_attention, which is causal only")
            return self.core_attn(q, k, v, documents)
        if windowed:
            say_once(
                f"sliding_window={window} is below the sequence length {length}: attention is computed without fusions.flash_attention, which is causal only"
            )
            return self.core_attn(q, k, v)
        return nki_flash_attn_func(q, k, v, dropout_p=dropout, transpose_nki_inputs=False)

    def _check_ring(self, window: int | None) -> None:
        if window is not None:
            raise ValueError(
                f"sliding_window={window} of the model's config.json with context_parallel_size={parallel_groups.size('cp')}: ring attention is causal "
                "only. Set context_parallel_size=1, or sliding_window to null"
            )
        if not self.options.use_ring_attention:
            raise ValueError(
                f"context_parallel_size={parallel_groups.size('cp')} needs model.fusions.ring_attention=True (and flash_attention=False): a rank holds "
                "a part of each sequence"
            )


def head_dim(config: Any) -> int:
    """Size of a head. Raises ValueError if hidden_size does not divide, and no head_dim is given."""
    found = getattr(config, "head_dim", None)
    if found:
        return int(found)
    if config.hidden_size % config.num_attention_heads:
        raise ValueError(
            f"hidden_size={config.hidden_size} must be a multiple of num_attention_heads={config.num_attention_heads}, or give head_dim in config.json"
        )
    return int(config.hidden_size // config.num_attention_heads)


def kv_copies(config: Any) -> int:
    """How often each K/V head is held: `kv_shared_group_size`; if that is 1 and cannot be, the smallest number that can.

    Raises ValueError for heads or a number of copies that do not fit the tensor-parallel ranks.
    """
    tp, heads, kv = parallel_groups.size("tp"), config.num_attention_heads, config.num_key_value_heads
    per_rank(config, "num_attention_heads")
    if heads % kv:
        raise ValueError(f"num_attention_heads={heads} must be a multiple of num_key_value_heads={kv} (the model's config.json)")
    asked = Options.of(config).kv_shared_group_size
    fit = kv_groups.fitting_copies(heads, kv, tp)
    if asked in fit:
        return asked
    if asked != 1:
        raise ValueError(
            f"kv_replicator={asked} with num_key_value_heads={kv}, num_attention_heads={heads} and tensor_model_parallel_size={tp}: one of "
            f"{', '.join(map(str, fit))}"
        )
    say_once(
        f"{kv} K/V heads do not divide by tensor_model_parallel_size={tp}: each is held {fit[0]} times (distributed_strategy.kv_replicator={fit[0]})"
    )
    return fit[0]
