"""Llama with NeuronX Distributed layers, written from one rank's point of view: a rank's share of the heads, of the MLP and of the vocabulary.

The configuration is `transformers.LlamaConfig` with a few fields of our own (see `NxDLlamaOptions`). Hidden states are [batch, seq, hidden], or
[seq / tp, batch, hidden] with sequence parallelism.
"""

from __future__ import annotations

import dataclasses
from functools import partial

import torch
import torch.nn.functional as F
from neuronx_distributed.kernels import nki_flash_attn_func, nki_ring_attn_func
from neuronx_distributed.modules.qkv_linear import GQAQKVColumnParallelLinear
from neuronx_distributed.modules.rms_norm import RMSNorm
from neuronx_distributed.parallel_layers import parallel_state
from neuronx_distributed.parallel_layers.layers import ColumnParallelLinear, ParallelEmbedding, RowParallelLinear
from neuronx_distributed.parallel_layers.loss_functions import parallel_cross_entropy
from neuronx_distributed.parallel_layers.utils import divide
from torch import nn
from transformers import LlamaConfig


@dataclasses.dataclass(frozen=True)
class NxDLlamaOptions:
    """How the model lies on the ranks.

    sequence_parallel: activations between the parallel layers are split along the sequence. kv_size_multiplier: copies of each K/V head, for more
    tensor-parallel ranks than there are K/V heads. fuse_qkv: one weight for q, k and v. flash: blockwise attention. dtype: of parameters and
    activations.
    """

    sequence_parallel: bool = False
    kv_size_multiplier: int = 1
    fuse_qkv: bool = True
    flash: bool = False
    dtype: torch.dtype = torch.float32


def rotate_half(x: torch.Tensor) -> torch.Tensor:
    low, high = x.chunk(2, dim=-1)
    return torch.cat((-high, low), dim=-1)


class RotaryEmbedding(nn.Module):
    """Cosines and sines [length, head_dim] of the places in the whole sequence that this rank holds."""

    inv_freq: torch.Tensor

    def __init__(self, head_dim: int, theta: float):
        super().__init__()
        self.register_buffer("inv_freq", theta ** (-torch.arange(0, head_dim, 2).float() / head_dim), persistent=False)

    def forward(self, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        first = parallel_state.get_context_model_parallel_rank() * length
        places = torch.arange(length, device=self.inv_freq.device) + first
        angles = torch.outer(places.float(), self.inv_freq.float())
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos(), angles.sin()


class Attention(nn.Module):
    def __init__(self, config: LlamaConfig, options: NxDLlamaOptions, init):
        super().__init__()
        tp = parallel_state.get_tensor_model_parallel_size()
        self.options = options
        self.head_dim = getattr(config, "head_dim", None) or divide(config.hidden_size, config.num_attention_heads)
        self.num_heads = divide(config.num_attention_heads, tp)
        self.num_kv_heads = divide(config.num_key_value_heads * options.kv_size_multiplier, tp)
        layout = {
            "sequence_parallel_enabled": options.sequence_parallel,
            "dtype": options.dtype,
            "init_method": init,
            "sequence_dimension": 0,
        }
        q_size, kv_size = config.num_attention_heads * self.head_dim, config.num_key_value_heads * self.head_dim
        bias = getattr(config, "attention_bias", False)
        self.qkv_proj = GQAQKVColumnParallelLinear(
            config.hidden_size,
            [q_size, kv_size],
            bias=bias,
            gather_output=False,
            kv_size_multiplier=options.kv_size_multiplier,
            fuse_qkv=options.fuse_qkv,
            **layout,
        )
        self.o_proj = RowParallelLinear(q_size, config.hidden_size, bias=bias, input_is_parallel=True, **layout)

    def heads(self, x: torch.Tensor, count: int) -> torch.Tensor:
        """[batch, count, length, head_dim]."""
        x = x.view(*x.shape[:2], count, self.head_dim)
        return x.permute(1, 2, 0, 3) if self.options.sequence_parallel else x.transpose(1, 2)

    def forward(self, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv_proj(hidden)
        q, k, v = self.heads(q, self.num_heads), self.heads(k, self.num_kv_heads), self.heads(v, self.num_kv_heads)
        q = (q * cos + rotate_half(q) * sin).to(v.dtype)
        k = (k * cos + rotate_half(k) * sin).to(v.dtype)
        k, v = (x.repeat_interleave(self.num_heads // self.num_kv_heads, dim=1) for x in (k, v))
        if parallel_state.get_context_model_parallel_size() > 1:
            out = nki_ring_attn_func(q, k, v, torch.distributed.get_rank(), parallel_state.get_context_model_parallel_src_tgt_pairs())
        elif self.options.flash:
            out = nki_flash_attn_func(q, k, v, transpose_nki_inputs=False)
        else:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out = out.permute(2, 0, 1, 3) if self.options.sequence_parallel else out.transpose(1, 2)
        return self.o_proj(out.reshape(*out.shape[:2], self.num_heads * self.head_dim))


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x)); gate and up are one weight, each shared out by itself (stride 2)."""

    def __init__(self, config: LlamaConfig, options: NxDLlamaOptions, init):
        super().__init__()
        layout = {
            "sequence_parallel_enabled": options.sequence_parallel,
            "dtype": options.dtype,
            "init_method": init,
            "sequence_dimension": 0,
        }
        self.size = divide(config.intermediate_size, parallel_state.get_tensor_model_parallel_size())
        bias = getattr(config, "mlp_bias", False)
        self.gate_up_proj = ColumnParallelLinear(
            config.hidden_size, 2 * config.intermediate_size, stride=2, bias=bias, gather_output=False, **layout
        )
        self.down_proj = RowParallelLinear(config.intermediate_size, config.hidden_size, bias=bias, input_is_parallel=True, **layout)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up_proj(hidden).split(self.size, dim=-1)
        return self.down_proj(F.silu(gate) * up)


class DecoderLayer(nn.Module):
    """Attention and `mlp`, each added to what goes past it. mlp: what takes the place of Llama's MLP."""

    def __init__(self, config: LlamaConfig, options: NxDLlamaOptions, init, mlp: nn.Module | None = None):
        super().__init__()
        norm = partial(
            RMSNorm, config.hidden_size, eps=config.rms_norm_eps, sequence_parallel_enabled=options.sequence_parallel, dtype=options.dtype
        )
        self.input_layernorm = norm()
        self.self_attn = Attention(config, options, init)
        self.post_attention_layernorm = norm()
        self.mlp = MLP(config, options, init) if mlp is None else mlp

    def forward(self, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), cos, sin)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class LlamaModel(nn.Module):
    """Hidden states of token ids; models with other layers override `make_layer`."""

    def __init__(self, config: LlamaConfig, options: NxDLlamaOptions, init):
        super().__init__()
        self.options = options
        self.embed_tokens = ParallelEmbedding(
            config.vocab_size,
            config.hidden_size,
            init_method=init,
            dtype=options.dtype,
            sequence_parallel_enabled=options.sequence_parallel,
        )
        self.layers = nn.ModuleList(self.make_layer(n, config, options, init) for n in range(config.num_hidden_layers))
        self.norm = RMSNorm(
            config.hidden_size, eps=config.rms_norm_eps, sequence_parallel_enabled=options.sequence_parallel, dtype=options.dtype
        )
        theta = (getattr(config, "rope_parameters", None) or {}).get("rope_theta") or getattr(config, "rope_theta", 10000.0)
        self.rotary = RotaryEmbedding(self.layers[0].self_attn.head_dim, theta)

    def make_layer(self, index: int, config: LlamaConfig, options: NxDLlamaOptions, init) -> DecoderLayer:
        return DecoderLayer(config, options, init)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed_tokens(input_ids)
        cos, sin = self.rotary(input_ids.shape[1])
        for layer in self.layers:
            hidden = layer(hidden, cos, sin)
        return self.norm(hidden)


class LlamaForCausalLM(nn.Module):
    """forward(input_ids [batch, seq], labels) returns (loss, logits [batch, seq, vocab / tp]).

    labels: shifted already (by `shift_labels`, or by the cut for context parallelism), with -100 where there is none. The loss is the mean over the whole
    sequence's labels; with context parallelism it is cp times the rank's share, so that averaging over cp ranks gives that mean.
    """

    model_class = LlamaModel

    def __init__(self, config: LlamaConfig, options: NxDLlamaOptions | None = None):
        super().__init__()
        self.config = config
        self.options = options = options or NxDLlamaOptions()
        init = partial(nn.init.normal_, mean=0.0, std=config.initializer_range)
        self.model = self.model_class(config, options, init)
        self.lm_head = ColumnParallelLinear(
            config.hidden_size,
            config.vocab_size,
            bias=False,
            gather_output=False,
            dtype=options.dtype,
            init_method=init,
            sequence_parallel_enabled=options.sequence_parallel,
            sequence_dimension=0,
        )

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> tuple[torch.Tensor | None, torch.Tensor]:
        logits = self.logits(self.model(input_ids))
        return None if labels is None else self.loss(logits, labels), logits

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        found = self.lm_head(hidden)
        return found.transpose(0, 1).contiguous() if self.options.sequence_parallel else found

    def loss(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        losses = parallel_cross_entropy(logits.float(), labels)
        cp = parallel_state.get_context_model_parallel_size()
        count = labels.shape[0] * (labels.shape[1] * cp - 1)
        return losses.sum() * cp / count
