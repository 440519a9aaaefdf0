"""Decoders of Hugging Face's configurations, as one rank computes them with a KV cache. Parameters have the names that transformers' Llama has.

Legend: B rows, S tokens, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from nxd_jax.inference import adapted_linear, gpt2, lora_serving
from nxd_jax.inference.attention import Attention
from nxd_jax.inference.config import InferenceConfig
from nxd_jax.inference.flash_decoding import SplitKVCacheManager
from nxd_jax.inference.kv_cache import KVCacheManager
from nxd_jax.inference.lora_serving import LoraServingConfig
from nxd_jax.inference.mixture import mixture
from nxd_jax.inference.step import Rotation, Step
from nxd_jax.inference.token_choice import TokenChoice
from nxd_jax.tensor_parallel.embedding import ParallelEmbedding
from nxd_jax.tensor_parallel.linear import ColumnParallelLinear
from nxd_jax.training.models.hf_models import hf_weights, rotary
from nxd_jax.training.models.hf_models.layers import LlamaRMSNorm

Layout = dict[str, Any]
"""dtype and device of parameters."""


class GatedMLP(nn.Module):
    """down_proj(activation(gate_proj(x)) * up_proj(x)). An intermediate_size that the ranks do not divide is padded with zeros."""

    def __init__(self, config: Any, layout: Layout, room: LoraServingConfig | None = None):
        super().__init__()
        from transformers.activations import ACT2FN

        size, bias = (config.hidden_size, config.intermediate_size), bool(getattr(config, "mlp_bias", False))
        self.gate_proj = adapted_linear.column("gate_proj", *size, room, bias=bias, pad=True, **layout)
        self.up_proj = adapted_linear.column("up_proj", *size, room, bias=bias, pad=True, **layout)
        self.down_proj = adapted_linear.row("down_proj", *size[::-1], room, bias=bias, pad=True, **layout)
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, x: torch.Tensor, adapter_ids: torch.Tensor | None = None) -> torch.Tensor:
        gate, up = (adapted_linear.through(layer, x, adapter_ids) for layer in (self.gate_proj, self.up_proj))
        return adapted_linear.through(self.down_proj, self.act_fn(gate) * up, adapter_ids)


def rms_norm(config: Any, dtype: torch.dtype) -> nn.Module:
    """Llama's."""
    return LlamaRMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype)


Source = Callable[[str], tuple[str, Callable[[torch.Tensor], torch.Tensor]]]
"""From one of our parameters to the tensor that holds it, and what is made of that one."""


def llama_source(mine: str) -> tuple[str, Callable[[torch.Tensor], torch.Tensor]]:
    """transformers' own name; what our experts have is transposed."""
    (name,) = hf_weights.hf_names(mine)
    return name, (lambda full: full.transpose(1, 2)) if ".expert_mlps." in mine else (lambda full: full)


@dataclasses.dataclass(frozen=True)
class Family:
    """What sets a kind of model apart from Llama.

    qkv_bias, out_bias: attention has these biases, whatever the configuration says. mlp, norm: make those parts of a layer. learned_positions: an embedding
    of positions in place of rotations. source: where files have its weights. check: raises for configurations that are not supported.
    """

    qkv_bias: bool = False
    out_bias: bool = False
    mlp: Callable[[Any, Layout], nn.Module] = GatedMLP
    norm: Callable[[Any, torch.dtype], nn.Module] = rms_norm
    learned_positions: bool = False
    source: Source = llama_source
    check: Callable[[Any], None] = lambda config: None


FAMILIES = {
    "gpt2": Family(True, True, gpt2.MLP, gpt2.norm, learned_positions=True, source=gpt2.source, check=gpt2.check),
    "llama": Family(),
    "mistral": Family(),
    "mixtral": Family(mlp=mixture),
    "qwen2": Family(qkv_bias=True),
}
"""By `model_type` of a config.json."""


def family(config: Any) -> Family:
    """Of a configuration. Raises ValueError, naming those there are."""
    if config.model_type not in FAMILIES:
        raise ValueError(f"model_type {config.model_type!r} of config.json must be one of {', '.join(sorted(FAMILIES))}")
    return FAMILIES[config.model_type]


def window(config: Any, layer: int) -> int | None:
    """Tokens that a layer's attention sees; None for all."""
    kinds, found = getattr(config, "layer_types", None), getattr(config, "sliding_window", None)
    return None if kinds and kinds[layer] != "sliding_attention" else found


class Rotary(nn.Module):
    """Cosines and sines of positions [..., S]: [..., S, head_dim] float32. Raises NotImplementedError for kinds whose frequencies change with the length."""

    inv_freq: torch.Tensor

    def __init__(self, config: Any):
        super().__init__()
        kind = rotary.kind_of(config)
        if kind in rotary.BY_LENGTH:
            raise NotImplementedError(
                f"rope_type {kind!r} of config.json changes frequencies with the length of a text, and what is in the KV cache was turned by others: use "
                "a model with default, linear, yarn or llama3"
            )
        found, self.scaling = rotary.frequencies(config)
        self.register_buffer("inv_freq", found.float(), persistent=False)

    def forward(self, positions: torch.Tensor) -> Rotation:
        angles = positions.float().unsqueeze(-1) * self.inv_freq
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos() * self.scaling, angles.sin() * self.scaling


class DecoderLayer(nn.Module):
    """Attention and MLP (or experts), each added to what goes past it."""

    def __init__(self, config: Any, layer: int, options: InferenceConfig, layout: Layout):
        super().__init__()
        kind, bias = family(config), bool(getattr(config, "attention_bias", False))
        self.self_attn = Attention(config, layer, options, bias or kind.qkv_bias, bias or kind.out_bias, window(config, layer), layout)
        self.mlp = GatedMLP(config, layout, options.lora_config) if kind.mlp is GatedMLP else kind.mlp(config, layout)
        self.input_layernorm = kind.norm(config, layout["dtype"])
        self.post_attention_layernorm = kind.norm(config, layout["dtype"])

    def forward(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), step)
        x_normed = self.post_attention_layernorm(x)
        found = self.mlp(x_normed) if step.adapter_ids is None else self.mlp(x_normed, step.adapter_ids)
        return x + (found[0] if isinstance(found, tuple) else found)


class Decoder(nn.Module):
    """Embedding, layers, norm.

    Raises ValueError for a cache with more tokens than learned positions.
    """

    def __init__(self, config: Any, options: InferenceConfig, layout: Layout):
        super().__init__()
        kind = family(config)
        self.embed_tokens = ParallelEmbedding(config.vocab_size, config.hidden_size, pad=True, **layout)
        self.layers = nn.ModuleList(DecoderLayer(config, k, options, layout) for k in range(config.num_hidden_layers))
        self.norm = kind.norm(config, layout["dtype"])
        if not kind.learned_positions:
            self.rotary_emb = Rotary(config)
            return
        if options.seq_len > config.max_position_embeddings:
            raise ValueError(
                f"seq_len={options.seq_len} is more than the {config.max_position_embeddings} positions that the {config.model_type} model has learned: "
                "lower it"
            )
        self.embed_positions = nn.Embedding(config.max_position_embeddings, config.hidden_size, **layout)

    def forward(self, ids: torch.Tensor, step: Step) -> torch.Tensor:
        places, x = step.places(ids), self.embed_tokens(ids)
        if hasattr(self, "embed_positions"):
            x = x + self.embed_positions(places)
        else:
            step = dataclasses.replace(step, rotation=self.rotary_emb(places if places.dim() == 1 else places[:, None]))
        for layer in self.layers:
            x = layer(x, step)
        found: torch.Tensor = self.norm(x)
        return found


class CausalLM(nn.Module):
    """A language model with a KV cache, for `ModelBuilder`: it is made, and traced, within `NxDParallelState`.

    A prompt: input_ids [B, S] with attention_mask [B, S], 0 for padding, on the left, on the right or between; the tokens are counted without it, and their
    keys and values go to lines seq_ids [B] of the cache (default: row i to line i). Gives what follows each row's last token (for a row without, anything).
    Later tokens: input_ids [B, S] with position_ids [B], the place of each row's first one in its text. Gives what follows each token.

    adapter_ids [B]: slots of the rows' LoRA adapters, 0 for none, for a model with `lora_config` (else ValueError).

    What is given: logits [B, V] of a prompt, [B, S, V] of later tokens, float32; with on_device_sampling tokens [B] or [B, S], int64.

    config: transformers'. device: "meta" makes parameters without values, which a trace does not need.
    Attribute `cache_length`: slots of the cache that later tokens see, None for all: set it before a trace.
    """

    def __init__(self, config: Any, options: InferenceConfig, device: Any = None):
        super().__init__()
        layout: Layout = {"dtype": options.torch_dtype or getattr(config, "dtype", None) or torch.float32, "device": device}
        self.family = family(config)
        self.family.check(config)
        if options.lora_config is not None and config.model_type not in lora_serving.FAMILIES:
            raise NotImplementedError(
                f"LoRA adapters cannot be served for model_type {config.model_type!r}, only for {', '.join(lora_serving.FAMILIES)}: merge one into the "
                "model with PEFT's merge_and_unload, and leave lora_config out"
            )
        self.has_adapters = options.lora_config is not None
        if options.ep_degree > 1 and self.family.mlp is not mixture:
            raise ValueError(
                f"ep_degree={options.ep_degree} shares out experts, and a {config.model_type} model has none: leave it 1, and raise tp_degree instead"
            )
        self.cache_length: int | None = None
        self.model = Decoder(config, options, layout)
        self.lm_head = ColumnParallelLinear(config.hidden_size, config.vocab_size, bias=False, gather_output=False, pad=True, **layout)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight
        first: Any = self.model.layers[0].self_attn
        cache = functools.partial(SplitKVCacheManager, ranks=first.sharing) if first.sharing > 1 else KVCacheManager
        self.kv_mgr = cache(
            config.num_hidden_layers,
            options.batch_size,
            first.kv_heads_per_rank,
            options.seq_len,
            first.head_dim,
            quantization=options.kv_quant_config,
            **layout,
        )
        self.choice = TokenChoice(config.vocab_size, options.top_k if options.on_device_sampling else None)
        self.eval()

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        seq_ids: torch.Tensor | None = None,
        adapter_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        steps = torch.arange(input_ids.shape[1], device=input_ids.device)
        if (attention_mask is None) == (position_ids is None):
            raise ValueError("give attention_mask for prompts, or position_ids for later tokens, and not both")
        if adapter_ids is not None and not self.has_adapters:
            raise ValueError(
                "adapter_ids are for a model with room for adapters: make it with InferenceConfig(lora_config=LoraServingConfig(...))"
            )
        if position_ids is not None:
            x = self.model(input_ids, Step(self.kv_mgr, position_ids[:, None] + steps, seq_ids, self.cache_length, adapter_ids=adapter_ids))
            return self.choice(self.lm_head(x))
        assert attention_mask is not None
        padding = attention_mask == 0
        ids = input_ids.gather(1, padding.int().argsort(stable=True, dim=1))  # tokens first, in their order
        x = self.model(ids, Step(self.kv_mgr, None, seq_ids, adapter_ids=adapter_ids))
        last = ((~padding).sum(1) - 1).clamp(min=0)
        x = x.gather(1, last[:, None, None].expand(-1, 1, x.shape[2]))
        return self.choice(self.lm_head(x))[:, 0]
