"""Keys of `model`."""

from __future__ import annotations

from typing import Any

from nxd_jax.training.config.keys.kinds import Key, anything, listing, number, options_of, real, section, switch, text, whole


def _megatron(make: Any, *args: Any, **options: Any) -> Key:
    """A key that Megatron models have."""
    found: Key = make(*args, only="megatron", **options)
    return found


FUSIONS: dict[str, Key] = {"softmax": switch(), "flash_attention": switch(), "ring_attention": switch()}

MOE: dict[str, Key] = {
    "num_experts": whole(1),
    "frequency": whole(1),
    "dropout": number(0),
    "capacity_factor": real(),
    "dropless": switch(),
    "top_k": whole(1),
    "output_router_logits": switch(),
    "router_aux_loss_coef": number(0),
    "normalize_top_k_affinities": switch(),
    "glu_mlp": switch(),
    "routing_algorithm": text("top_k", "sinkhorn"),
    "router_activation": text("sigmoid", "softmax", only="megatron"),
    "sinkhorn_iterations": whole(1, only="megatron"),
    "sinkhorn_tol": anything(only="megatron"),
}

OPTIM = options_of()
"""`optim`: rules.optimization asks the optimizer's class, and the schedule's, what they take."""

MODEL: dict[str, Key] = {
    "_target_": text(),
    "model_config": text(),
    "encoder_seq_length": whole(1, null=False, required=True),
    "max_position_embeddings": whole(1),
    "num_layers": whole(-1),
    "hidden_size": whole(-1),
    "rope_theta": number(),
    "qkv_linear": switch(),
    "fuse_qkv": switch(),
    "transpose_nki_inputs": switch(unread="how the NKI attention kernel takes its inputs"),
    "pipeline_cuts": listing(),
    "use_cpu_initialization": switch(),
    "weight_init_only": switch(),
    "save_logits": switch(only="megatron"),
    "activations_checkpoint_granularity": text("selective", "full"),
    "activations_checkpoint_recompute": Key(("list", "str")),
    "activations_checkpoint_recompute_mlp": switch(unread="activations_checkpoint_recompute: [LlamaMLP] took its place"),
    "fusions": section(FUSIONS),
    "do_layer_norm_weight_decay": switch(),
    "moe": section(MOE),
    "optim": OPTIM,
    # model_source: megatron
    "ffn_hidden_size": _megatron(whole, 1),
    "num_attention_heads": _megatron(whole, 1),
    "num_kv_heads": _megatron(whole, 1),
    "kv_channels": _megatron(whole, 1),
    "init_method_std": _megatron(number, 0),
    "use_scaled_init_method": _megatron(switch),
    "hidden_dropout": _megatron(number, 0),
    "attention_dropout": _megatron(number, 0),
    "ffn_dropout": _megatron(number, 0),
    "apply_query_key_layer_scaling": _megatron(
        switch, unread="whether scores are divided by the layer's number, and multiplied again before the softmax"
    ),
    "normalization": _megatron(text, "layernorm", "layernorm1p", "rmsnorm"),
    "layernorm_epsilon": _megatron(number, 0),
    "make_vocab_size_divisible_by": _megatron(whole, 1),
    "persist_layer_norm": _megatron(switch, unread="which CUDA kernel computes norms"),
    "share_embeddings_and_output_weights": _megatron(switch),
    "position_embedding_type": _megatron(text, "learned_absolute", "rope"),
    "rotary_percentage": _megatron(number, 0),
    "position_freq_base": _megatron(number, 0),
    "position_abf_factor": _megatron(number, 0),
    "positition_interpolation_factor": _megatron(number, 0),
    "sliding_window_size": _megatron(whole, 1),
    "activation": _megatron(text, "gelu", "geglu", "reglu", "swiglu"),
    "has_bias": _megatron(switch),
    "transformer_block_type": _megatron(text, "pre_ln", "post_ln", "normformer", "gpt_j"),
    "fp32_residual_connection": _megatron(switch),
    "fp16_lm_cross_entropy": _megatron(switch),
    "masked_softmax_fusion": _megatron(switch, unread="which CUDA kernel computes the softmax"),
}

REJECTED: dict[str, tuple[tuple[Any, ...], str]] = {
    "megatron_amp_o2": ((False, None), "precision.type says the precision"),
    "gradient_accumulation_fusion": ((False, None), "it is a CUDA kernel"),
    "use_emha": ((False, None), "it is a CUDA kernel"),
    "bias_dropout_add_fusion": ((False, None), "it is a CUDA kernel"),
    "bias_activation_fusion": ((False, None), "it is a CUDA kernel"),
    "bias_dropout_fusion": ((False, None), "it is a CUDA kernel"),
    "activations_checkpoint_num_layers": ((0, 1, None), "activations_checkpoint_granularity: full computes every layer again"),
    "activations_checkpoint_method": (("uniform", None), "activations_checkpoint_granularity: full computes every layer again"),
    "activations_checkpoint_layers_per_pipeline": ((None,), "activations_checkpoint_granularity: full computes every layer again"),
    "num_micro_batches_with_partial_activation_checkpoints": ((None,), "all micro-batches are computed in one way"),
    "disable_layer_norm_checkpointing": ((True, None), "norms are not computed again"),
    "moe_dropout": ((0, 0.0, None), "model.moe.dropout is its place"),
    "distributed_fused_adam": ((False, None), "distributed_strategy.zero1 shares the optimizer's state out"),
}
"""Keys of Megatron models that the original refuses, with the values that it lets pass, and why."""

FROM_JSON = {
    "intermediate_size": "intermediate_size",
    "vocab_size": "vocab_size",
    "num_attention_heads": "num_attention_heads",
    "num_key_value_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "rms_norm_eps": "rms_norm_eps",
    "ffn_hidden_size": "intermediate_size",
    "num_kv_heads": "num_key_value_heads",
}
"""Sizes that Hugging Face models take from model_config alone, by the names that people give them in `model`."""

RECOMPUTE = {
    "llama": ("CoreAttention", "LlamaDecoderLayer", "LlamaRMSNorm", "LlamaMLP", "ActivationMultiplyMLP", "LlamaRotaryEmbedding"),
    "mixtral": ("CoreAttention", "MixtralDecoderLayer", "MixtralRMSNorm", "MixtralRotaryEmbedding", "LlamaMLP", "MoE"),
    "megatron": ("CoreAttention", "NeuronSwitchMLP"),
}
"""Names for `activations_checkpoint_recompute`, by model."""
