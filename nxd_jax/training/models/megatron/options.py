"""What a Megatron GPT is made of: the arguments of the original's `GPTModel`, checked."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import torch
from torch import nn

from nxd_jax.tensor_parallel import parallel_groups

ACTIVATIONS = ("gelu", "geglu", "reglu", "swiglu")
GATED = ("geglu", "reglu", "swiglu")
"""Activations of one half of what the first projection gives, times the other half."""
NORMALIZATIONS = ("layernorm", "layernorm1p", "rmsnorm")
BLOCKS = ("pre_ln", "post_ln", "normformer", "gpt_j")
POSITIONS = ("learned_absolute", "rope")
ROUTING = ("top_k", "sinkhorn")

WITHOUT_EFFECT = (
    "activations_checkpoint_granularity",
    "activations_checkpoint_layers_per_pipeline",
    "activations_checkpoint_method",
    "activations_checkpoint_num_layers",
    "apply_query_key_layer_scaling",
    "attention_type",
    "expert_model_parallel_size",
    "masked_softmax_fusion",
    "parallel_output",
    "persist_layer_norm",
    "reduce_amax",
    "resume_from_checkpoint",
    "use_cpu_initialization",
)
"""Arguments of the original that are accepted. Dividing scores by the layer's number (apply_query_key_layer_scaling) is undone before the softmax there."""

ONLY: dict[str, tuple[Any, str]] = {
    "bias_activation_fusion": (False, "it is a CUDA kernel"),
    "bias_dropout_add_fusion": (False, "it is a CUDA kernel"),
    "fp16_lm_cross_entropy": (False, "the loss is computed in float32"),
    "gradient_accumulation_fusion": (False, "it is a CUDA kernel"),
    "headscale": (False, "heads have no scales of their own"),
    "moe_dropout": (0, "experts have no dropout"),
    "multi_query_attention": (False, "num_kv_heads=1 means the same"),
    "normalize_attention_scores": (True, "scores are divided by the root of the head's size"),
    "num_tokentypes": (0, "tokens have no types"),
    "precision": (32, "precision.type of the configuration says the precision"),
    "use_emha": (False, "it is a CUDA kernel"),
}
"""Arguments of the original that take one value here, and why."""


@dataclasses.dataclass(frozen=True)
class GPTOptions:
    """The arguments of `GPTModel`, under the original's names.

    vocab_size: padded, a multiple of the tensor-parallel ranks. kv_channels: size of a head, default hidden / heads. num_kv_heads: default as many as heads.
    use_scaled_init_method: the projections back to the hidden size begin with init_method_std / sqrt(2 num_layers). bias: of linear layers. openai_gelu: the
    approximation with tanh, for activation gelu and geglu. position_freq_base * position_abf_factor: base of the rotary frequencies;
    position_interpolation_factor divides positions; rotary_percentage: part of each head that is turned. sliding_window: tokens that a token sees, itself
    included; None: all before it. fp32_residual_connection: what goes past the layers is float32. sequence_parallel: between parallel layers activations
    are cut along the sequence. save_logits: return them, too.

    num_moe_experts above 1: every `moe_frequency`th layer, counted from 1, has experts. moe_capacity_factor: None and 0: they take all tokens.
    output_router_logits: the loss has router_aux_loss_coef times the loss of unevenly used experts in it. moe_router_activation, moe_sinkhorn_iterations,
    moe_sinkhorn_tol: of sinkhorn routing. token_shuffle_group_size: data-parallel ranks that mix their tokens first.

    reduce_dtype: in which tensor-parallel ranks add up (not in the original's signature).
    """

    vocab_size: int
    hidden_size: int
    max_position_embeddings: int
    num_layers: int
    num_attention_heads: int
    ffn_hidden_size: int
    kv_channels: int | None = None
    num_kv_heads: int | None = None
    init_method_std: float = 0.02
    use_scaled_init_method: bool = True
    hidden_dropout: float = 0.1
    attention_dropout: float = 0.1
    ffn_dropout: float = 0.0
    fp32_residual_connection: bool = False
    normalization: str = "layernorm"
    layernorm_epsilon: float = 1e-5
    bias: bool = True
    activation: str = "gelu"
    openai_gelu: bool = False
    transformer_block_type: str = "pre_ln"
    position_embedding_type: str = "learned_absolute"
    rotary_percentage: float = 1.0
    position_interpolation_factor: float = 1.0
    position_freq_base: float = 10000.0
    position_abf_factor: float = 1.0
    sliding_window: int | None = None
    share_embeddings_and_output_weights: bool = True
    sequence_parallel: bool = False
    save_logits: bool = False
    num_moe_experts: int = 1
    moe_frequency: int = 1
    moe_capacity_factor: float | None = 1.0
    moe_routing_algorithm: str = "top_k"
    moe_router_activation: str = "sigmoid"
    moe_sinkhorn_iterations: int = 30
    moe_sinkhorn_tol: float | None = None
    moe_top_k: int = 1
    output_router_logits: bool = False
    router_aux_loss_coef: float = 0.02
    normalize_top_k_affinities: bool = True
    token_shuffle_group_size: int = 1
    reduce_dtype: torch.dtype = torch.float32

    @classmethod
    def of(cls, arguments: dict[str, Any]) -> GPTOptions:
        """From the original's arguments. Raises TypeError for unknown ones, ValueError for what is not supported or does not go together."""
        known = {f.name for f in dataclasses.fields(cls)}
        if unknown := sorted(arguments.keys() - known - set(WITHOUT_EFFECT) - ONLY.keys()):
            raise TypeError(f"GPTModel has no argument {', '.join(unknown)}")
        for name, (allowed, why) in ONLY.items():
            if arguments.get(name, allowed) != allowed:
                raise ValueError(f"GPTModel({name}={arguments[name]!r}) is not supported: {why}; leave it out, or give {allowed!r}")
        found = cls(**{name: value for name, value in arguments.items() if name in known})
        _check(found)
        return found

    # -- sizes ----------------------------------------------------------------------------------------

    @property
    def head_dim(self) -> int:
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    @property
    def kv_heads(self) -> int:
        return self.num_kv_heads or self.num_attention_heads

    @property
    def gated(self) -> bool:
        """Whether the activation multiplies two halves."""
        return self.activation in GATED

    def has_experts(self, layer_number: int) -> bool:
        """Whether a layer, counted from 1, has experts."""
        return self.num_moe_experts > 1 and layer_number % self.moe_frequency == 0

    # -- layers ---------------------------------------------------------------------------------------

    @property
    def init_method(self) -> Any:
        """N(0, init_method_std)."""
        return functools.partial(nn.init.normal_, mean=0.0, std=self.init_method_std)

    @property
    def output_layer_init_method(self) -> Any:
        """Of projections back to the hidden size."""
        scale = math.sqrt(2.0 * self.num_layers) if self.use_scaled_init_method else 1.0
        return functools.partial(nn.init.normal_, mean=0.0, std=self.init_method_std / scale)

    def linear(self, output: bool = False) -> dict[str, Any]:
        """Arguments of parallel linear layers on [length, batch, hidden]. output: of those back to the hidden size."""
        return {
            "init_method": self.output_layer_init_method if output else self.init_method,
            "bias": self.bias,
            "sequence_parallel_enabled": self.sequence_parallel,
            "sequence_dimension": 0,
            "reduce_dtype": self.reduce_dtype,
        }


def _check(o: GPTOptions) -> None:
    for name, value, allowed in (
        ("activation", o.activation, ACTIVATIONS),
        ("normalization", o.normalization, NORMALIZATIONS),
        ("transformer_block_type", o.transformer_block_type, BLOCKS),
        ("position_embedding_type", o.position_embedding_type, POSITIONS),
        ("moe.routing_algorithm", o.moe_routing_algorithm, ROUTING),
    ):
        if value not in allowed:
            raise ValueError(f"{name}={value!r} must be one of {', '.join(allowed)}")
    _check_heads(o)
    tp = parallel_groups.size("tp")
    for name, size in (("ffn_hidden_size", o.ffn_hidden_size), ("the padded vocabulary", o.vocab_size)):
        if size % tp:
            raise ValueError(f"{name}={size} must be a multiple of tensor_model_parallel_size={tp}")
    if not 0 < o.rotary_percentage <= 1 or int(o.head_dim * o.rotary_percentage) % 2:
        raise ValueError(
            f"rotary_percentage={o.rotary_percentage} must be above 0, at most 1, and turn an even number of each head's {o.head_dim} values"
        )
    if o.sliding_window is not None and o.sliding_window < 1:
        raise ValueError(f"sliding_window_size={o.sliding_window} must be 1 or more, or null: a token sees itself at least")
    if o.transformer_block_type == "normformer" and tp > 1:
        raise ValueError(
            f"transformer_block_type=normformer with tensor_model_parallel_size={tp}: it normalizes over the MLP's whole width, which the ranks share out; "
            "set tensor_model_parallel_size to 1, or take pre_ln"
        )
    if o.num_moe_experts > 1:
        _check_experts(o)


def _check_heads(o: GPTOptions) -> None:
    tp, heads, kv = parallel_groups.size("tp"), o.num_attention_heads, o.kv_heads
    if o.kv_channels is None and o.hidden_size % heads:
        raise ValueError(f"hidden_size={o.hidden_size} must be a multiple of num_attention_heads={heads}, or give kv_channels")
    if heads % tp:
        raise ValueError(f"num_attention_heads={heads} must be a multiple of tensor_model_parallel_size={tp}")
    if heads % kv:
        raise ValueError(f"num_attention_heads={heads} must be a multiple of num_kv_heads={kv}")
    if kv % tp:
        raise ValueError(
            f"num_kv_heads={kv} must be a multiple of tensor_model_parallel_size={tp}: Megatron models hold no copies of K/V heads"
        )


def _check_experts(o: GPTOptions) -> None:
    wrong = [
        f"{name}={value!r} (must be {allowed!r})"
        for name, value, allowed in (
            ("activation", o.activation, "swiglu"),
            ("has_bias", o.bias, False),
            ("transformer_block_type", o.transformer_block_type, "pre_ln"),
        )
        if value != allowed
    ]
    if wrong:
        raise ValueError(f"experts (model.moe.num_experts={o.num_moe_experts}) do not go with {', '.join(wrong)}")
    if not 1 <= o.moe_frequency <= o.num_layers:
        raise ValueError(
            f"model.moe.frequency={o.moe_frequency} must be in 1..{o.num_layers}, the number of layers: every how manieth has experts"
        )
    if not 1 <= o.moe_top_k <= o.num_moe_experts:
        raise ValueError(f"model.moe.top_k={o.moe_top_k} must be in 1..{o.num_moe_experts}, the number of experts (num_experts)")
    if o.moe_routing_algorithm == "sinkhorn" and o.moe_top_k != 1:
        raise ValueError(f"model.moe.routing_algorithm=sinkhorn chooses one expert for each token, got top_k={o.moe_top_k}: set top_k to 1")
