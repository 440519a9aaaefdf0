"""Configurations of the shape of the original's 22 conf files, made from facts: what all have, what groups of them have, and what each has of its own."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import OmegaConf
from tokenizers import Tokenizer, models

from nxd_jax.training.data.megatron.writing import IndexedWriter

PRODUCT = "${multiply:${distributed_strategy.tensor_model_parallel_size}, ${distributed_strategy.pipeline_model_parallel_size}}"

BASE: dict[str, Any] = {
    "name": "hf_llama",
    "model_source": "hf",
    "seed": 1234,
    "trainer": {
        "devices": 32,
        "num_nodes": 1,
        "max_epochs": -1,
        "max_steps": 30000,
        "log_every_n_steps": 10,
        "val_check_interval": 30001,
        "check_val_every_n_epoch": None,
        "num_sanity_val_steps": 0,
        "limit_val_batches": 0.0,
        "limit_test_batches": 0.0,
        "gradient_clip_val": 1.0,
    },
    "exp_manager": {
        "log_local_rank_0_only": True,
        "create_tensorboard_logger": True,
        "explicit_log_dir": None,
        "exp_dir": None,
        "name": "hf_llama",
        "resume_if_exists": True,
        "resume_ignore_no_checkpoint": True,
        "create_checkpoint_callback": True,
        "checkpoint_callback_params": {
            "monitor": "step",
            "save_top_k": 1,
            "mode": "max",
            "save_last": False,
            "filename": "m--{step}-{consumed_samples}",
            "model_parallel_size": PRODUCT,
            "every_n_train_steps": 10,
        },
        "log_parameter_norm": True,
        "log_gradient_norm": True,
        "enable_recovery_time_instrumentation": False,
        "save_xser": True,
        "load_xser": True,
        "save_bf16": False,
        "async_checkpointing": False,
        "resume_from_checkpoint": None,
    },
    "distributed_strategy": {
        "tensor_model_parallel_size": 32,
        "pipeline_model_parallel_size": 1,
        "virtual_pipeline_model_parallel_size": 1,
        "zero1": True,
        "sequence_parallel": True,
        "kv_replicator": 4,
    },
    "data": {"micro_batch_size": 1, "global_batch_size": 1024, "train_dir": "/home/ubuntu/sets/8k"},
    "model": {
        "model_config": "/home/ubuntu/config.json",
        "encoder_seq_length": 8192,
        "max_position_embeddings": 8192,
        "num_layers": 32,
        "hidden_size": 4096,
        "qkv_linear": True,
        "fuse_qkv": True,
        "rope_theta": 500000.0,
        "use_cpu_initialization": True,
        "activations_checkpoint_granularity": "selective",
        "activations_checkpoint_recompute": ["CoreAttention"],
        "fusions": {"softmax": True, "flash_attention": True},
        "do_layer_norm_weight_decay": True,
        "optim": {
            "name": "adamw",
            "lr": 1.5e-5,
            "weight_decay": 0.1,
            "capturable": False,
            "betas": [0.9, 0.95],
            "sched": {
                "name": "CosineAnnealing",
                "warmup_steps": 2000,
                "max_steps": "${trainer.max_steps}",
                "constant_steps": 0,
                "min_lr": 1e-6,
            },
        },
    },
    "precision": {
        "type": "mixed_precision",
        "master_weights": False,
        "fp32_grad_acc": False,
        "xla_use_bf16": "0",
        "xla_downcast_bf16": "0",
        "neuron_rt_stochastic_rounding_en": "0",
    },
    "compiler_flags": "--model-type transformer",
    "compiler_cache_url": "/home/ubuntu/neuron_cache",
    "aync_exec_max_inflight_requests": 5,
    "bucket_size_collectives": 1024,
    "neuron_rt_exec_timeout": 100,
    "neuron_experimental_compress_rg": False,
}

GONE = object()
"""A key that a file does not have."""

LINEAR = {
    "model.optim.name": "adamw_fp32OptState",
    "model.optim.lr": 1.5e-4,
    "model.optim.weight_decay": 0.01,
    "model.optim.betas": [0.9, 0.999],
    "model.optim.sched": {"name": "LinearAnnealingWithWarmUp", "warmup_steps": 100, "max_steps": "${trainer.max_steps}"},
}
LLAMA3_8B = {**LINEAR, "trainer.max_steps": 10000, "trainer.val_check_interval": 10001}
TRN2 = {"trainer.devices": 64, "trainer.lnc": 2}
LLAMA3_70B = {
    "trainer.num_nodes": 16,
    "distributed_strategy.pipeline_model_parallel_size": 8,
    "model.num_layers": 80,
    "model.hidden_size": 8192,
}
LLAMA31 = {"model.max_position_embeddings": 131072, "exp_manager.checkpoint_callback_params.every_n_train_steps": 30000}
ALIGNED = {
    **LINEAR,
    "model.optim.sched": {"name": "LinearAnnealingWithWarmUp", "warmup_steps": 10, "max_steps": "${trainer.max_steps}"},
    "trainer.max_steps": 5000,
    "trainer.val_check_interval": 500,
    "exp_manager.resume_from_checkpoint": "/home/ubuntu/pretrained_ckpt",
    "data.global_batch_size": 64,
    "data.train_dir": "/home/ubuntu/rows.jsonl",
    "data.val_dir": None,
    "data.dev_choose_samples": None,
    "data.seq_length": 4096,
    "data.tokenizer": {"type": "/home/ubuntu/tokenizer"},
    "model.weight_init_only": True,
    "model.fuse_qkv": False,
}
FULL = {"model.activations_checkpoint_granularity": "full", "model.activations_checkpoint_recompute": None}
WARM_COSINE = {
    "model.optim.lr": 3e-4,
    "model.optim.capturable": True,
    "model.optim.sched": {"name": "CosineAnnealing", "warmup_steps": 4000, "constant_steps": 0, "min_lr": 3e-5},
}
MIXTRAL = {
    **WARM_COSINE,
    "name": "hf_mixtral",
    "trainer.num_nodes": 8,
    "trainer.max_steps": 22500,
    "trainer.val_check_interval": 22501,
    "trainer.log_every_n_steps": 1,
    "exp_manager.checkpoint_callback_params.every_n_train_steps": 200000,
    "distributed_strategy.pipeline_model_parallel_size": 4,
    "distributed_strategy.expert_model_parallel_size": 1,
    "distributed_strategy.kv_replicator": GONE,
    "data.global_batch_size": 128,
    "data.train_dir": "/home/ubuntu/sets/4k",
    "model.encoder_seq_length": 4096,
    "model.max_position_embeddings": "${.encoder_seq_length}",
    "model.rope_theta": 1e6,
    "model.qkv_linear": GONE,
    "model.fuse_qkv": GONE,
    "model.do_layer_norm_weight_decay": GONE,
    "model.activations_checkpoint_granularity": "full",
    "model.activations_checkpoint_recompute": GONE,
    "model.fusions.flash_attention": False,
    "model.moe": {
        "num_experts": 8,
        "frequency": 1,
        "dropout": 0.0,
        "capacity_factor": 2.0,
        "routing_algorithm": "top_k",
        "top_k": 2,
        "output_router_logits": True,
        "router_aux_loss_coef": 0.02,
        "normalize_top_k_affinities": True,
    },
    "precision.master_weights": True,
    "precision.fp32_grad_acc": True,
    "precision.fp32_grads_cc": False,
    "precision.xla_downcast_bf16": "1",
    "compiler_flags": "--model-type transformer --enable-saturate-infinity",
    "aync_exec_max_inflight_requests": 7,
}
DROPLESS = {"model.moe.capacity_factor": 0.0, "model.moe.dropless": True}
MEGATRON = {
    "data": {
        "micro_batch_size": 1,
        "global_batch_size": 1024,
        "data_prefix": [1.0, "/home/ubuntu/llama/book_text_document"],
        "index_mapping_dir": None,
        "data_impl": "mmap",
        "splits_string": "980,10,10",
        "seq_length": "${model.encoder_seq_length}",
        "skip_warmup": True,
        "num_workers": 1,
        "dataloader_type": "single",
        "reset_position_ids": False,
        "reset_attention_mask": False,
        "eod_mask_loss": False,
        "validation_drop_last": True,
        "no_seqlen_plus_one_input_tokens": False,
        "pad_samples_to_global_batch_size": False,
        "tokenizer": {
            "library": "huggingface",
            "type": "/home/ubuntu/tokenizer",
            "model": None,
            "vocab_file": None,
            "merge_file": None,
            "delimiter": None,
            "sentencepiece_legacy": False,
            "use_fast": False,
        },
    },
    "model": {
        "encoder_seq_length": 4096,
        "max_position_embeddings": "${.encoder_seq_length}",
        "num_layers": 32,
        "hidden_size": 4096,
        "ffn_hidden_size": 11008,
        "num_attention_heads": 32,
        "num_kv_heads": 32,
        "init_method_std": 0.021,
        "use_scaled_init_method": True,
        "hidden_dropout": 0,
        "attention_dropout": 0,
        "ffn_dropout": 0,
        "kv_channels": None,
        "apply_query_key_layer_scaling": True,
        "normalization": "rmsnorm",
        "layernorm_epsilon": 1e-5,
        "do_layer_norm_weight_decay": False,
        "make_vocab_size_divisible_by": 8,
        "persist_layer_norm": True,
        "share_embeddings_and_output_weights": False,
        "position_embedding_type": "rope",
        "rotary_percentage": 1,
        "activation": "swiglu",
        "transformer_block_type": "pre_ln",
        "has_bias": False,
        "use_cpu_initialization": True,
        "activations_checkpoint_granularity": "selective",
        "activations_checkpoint_recompute": ["CoreAttention"],
        "fusions": {"softmax": True, "flash_attention": False},
        "optim": BASE["model"]["optim"],
    },
    **WARM_COSINE,
    "model.optim.sched.warmup_steps": 2000,
    "name": "megatron_llama",
    "model_source": "megatron",
    "trainer.max_steps": 20000,
    "trainer.val_check_interval": 20000,
    "trainer.log_every_n_steps": 1,
    "trainer.limit_val_batches": 1,
    "trainer.limit_test_batches": 1,
    "exp_manager.checkpoint_callback_params.every_n_train_steps": 200,
    "distributed_strategy.tensor_model_parallel_size": 8,
    "distributed_strategy.kv_replicator": GONE,
}
MEGATRON_MIXTRAL = {
    **MEGATRON,
    **{k: v for k, v in MIXTRAL.items() if k.startswith(("precision.", "trainer.num", "trainer.max", "compiler", "aync"))},
    "name": "megatron_mixtral",
    "model.optim.sched.warmup_steps": 4000,
    "trainer.num_nodes": 16,
    "trainer.val_check_interval": 22500,
    "exp_manager.checkpoint_callback_params.every_n_train_steps": 200000,
    "distributed_strategy.tensor_model_parallel_size": 32,
    "distributed_strategy.pipeline_model_parallel_size": 4,
    "distributed_strategy.expert_model_parallel_size": 1,
    "distributed_strategy.token_shuffle_group_size": 1,
    "data.global_batch_size": 128,
    "model.ffn_hidden_size": 14336,
    "model.moe": {
        **MIXTRAL["model.moe"],
        "dropless": False,
        "router_activation": "sigmoid",
        "sinkhorn_iterations": 30,
        "sinkhorn_tol": "None",
    },
    **FULL,
}

DIFFERENCES: dict[str, dict[str, Any]] = {
    "hf_llama_7B": {
        **LLAMA3_8B,
        "model.optim.lr": 3e-4,
        "trainer.log_every_n_steps": 1,
        "distributed_strategy.tensor_model_parallel_size": 8,
        "distributed_strategy.kv_replicator": 1,
        "data.train_dir": "/home/ubuntu/sets/4k",
        "model.encoder_seq_length": 4096,
        "model.max_position_embeddings": "${.encoder_seq_length}",
        "model.num_layers": 4,
        "model.qkv_linear": False,
        "model.fuse_qkv": GONE,
        "model.rope_theta": GONE,
        "model.fusions.flash_attention": False,
        "exp_manager.checkpoint_callback_params.use_master_weights_in_ckpt": False,
    },
    "hf_llama3_8B": {**LLAMA3_8B, "trainer.num_nodes": 4},
    "hf_llama3_8B_trn2": {
        **LLAMA3_8B,
        **TRN2,
        "trainer.val_check_interval": 30001,
        "exp_manager.checkpoint_callback_params.every_n_train_steps": 500,
        "distributed_strategy.tensor_model_parallel_size": 16,
        "distributed_strategy.kv_replicator": 2,
        "model.activations_checkpoint_granularity": None,
        "model.activations_checkpoint_recompute": GONE,
    },
    "hf_llama3.1_8B": {**LLAMA31, "trainer.num_nodes": 32, "aync_exec_max_inflight_requests": 3},
    "hf_llama3_70B": {**LLAMA3_70B, "model.activations_checkpoint_recompute": ["CoreAttention", "LlamaMLP"]},
    "hf_llama3_70B_CP": {
        **LLAMA3_70B,
        "distributed_strategy.context_parallel_size": 2,
        "model.activations_checkpoint_recompute": ["CoreAttention", "LlamaMLP"],
        "model.fusions": {"softmax": True, "flash_attention": False, "ring_attention": True},
    },
    "hf_llama3_70B_trn2": {
        **LLAMA3_70B,
        **TRN2,
        "trainer.num_nodes": 8,
        "trainer.max_steps": 10000,
        "trainer.sequential_move_factor": 32,
        "exp_manager.checkpoint_callback_params.every_n_train_steps": 1000,
        "distributed_strategy.pipeline_model_parallel_size": 4,
        "model.pipeline_cuts": ["model.layers.18", "model.layers.39", "model.layers.60"],
        "model.transpose_nki_inputs": True,
        "model.fusions": {"flash_attention": True},
        "model.activations_checkpoint_recompute": ["LlamaRMSNorm", "ActivationMultiplyMLP"],
        "precision.parallel_layers_reduce_dtype": "bf16",
    },
    "hf_llama3.1_70B": {**LLAMA3_70B, **LLAMA31, "trainer.num_nodes": 32, "aync_exec_max_inflight_requests": 7},
    "hf_llama3.1_405B_trn1": {
        **LLAMA31,
        **FULL,
        "trainer.num_nodes": 64,
        "trainer.log_every_n_steps": 1,
        "exp_manager.checkpoint_callback_params.every_n_train_steps": 1000,
        "distributed_strategy.pipeline_model_parallel_size": 32,
        "data.global_batch_size": 256,
        "model.num_layers": 126,
        "model.hidden_size": 16384,
        "aync_exec_max_inflight_requests": 3,
    },
    "hf_llama3_8B_SFT": {
        **ALIGNED,
        "data.val_dir": "/home/ubuntu/rows.jsonl",
        "data.dev_choose_samples": 2250,
        "model_alignment_strategy": {"sft": {"packing": True}},
    },
    "hf_llama3_8B_SFT_lora": {
        **ALIGNED,
        "exp_manager.ckpt_ptl_version": "1.8.6",
        "distributed_strategy.zero1": False,
        "data.val_dir": "/home/ubuntu/rows.jsonl",
        "data.dev_choose_samples": 2250,
        "precision.type": "autocast",
        "model_alignment_strategy": {
            "sft": {"packing": True},
            "peft": {
                "lora_rank": 16,
                "lora_alpha": 32,
                "lora_dropout": 0.05,
                "lora_bias": "none",
                "lora_verbose": True,
                "target_modules": ["qkv_proj"],
                "load_lora_from_ckpt": False,
                "save_lora_base": True,
                "merge_lora": False,
                "save_lora_config_adapter": True,
                "merge_sharded_lora": False,
            },
        },
    },
    "hf_llama3_8B_DPO": {
        **ALIGNED,
        **FULL,
        "model.optim.lr": 5e-7,
        "exp_manager.checkpoint_callback_params.every_n_train_steps": 1000,
        "data.global_batch_size": 4,
        "model_alignment_strategy": {
            "dpo": {
                "kl_beta": 0.01,
                "loss_type": "sigmoid",
                "max_prompt_length": 2048,
                "precompute_ref_log_probs": True,
                "truncation_mode": "keep_start",
            }
        },
    },
    "hf_llama3_8B_ORPO": {
        **ALIGNED,
        **FULL,
        "model.optim.sched": {"name": "CosineAnnealing", "warmup_steps": 10, "max_steps": "${trainer.max_steps}"},
        "exp_manager.ckpt_ptl_version": "1.8.6",
        "data.global_batch_size": 16,
        "model.encoder_seq_length": 4096,
        "model_alignment_strategy": {"orpo": {"beta": 0.1, "max_prompt_length": 2048, "truncation_mode": "keep_start"}},
    },
    "hf_mixtral_8x7b": MIXTRAL,
    "hf_mixtral_8x7b_dropless": {**MIXTRAL, **DROPLESS, "name": "hf_mixtral_dropless"},
    "megatron_gpt": {
        **MEGATRON,
        "name": "megatron_gpt",
        "data.tokenizer": {
            **MEGATRON["data"]["tokenizer"],
            "library": "megatron",
            "type": "GPT2BPETokenizer",
            "vocab_file": "/home/ubuntu/gpt2/gpt2-vocab.json",
            "merge_file": "/home/ubuntu/gpt2/gpt2-merges.txt",
        },
        "model.encoder_seq_length": 2048,
        "model.ffn_hidden_size": 16384,
        "model.hidden_dropout": 0.1,
        "model.attention_dropout": 0.1,
        "model.ffn_dropout": 0.1,
        "model.normalization": "layernorm",
        "model.persist_layer_norm": False,
        "model.share_embeddings_and_output_weights": True,
        "model.position_embedding_type": "learned_absolute",
        "model.activation": "gelu",
        "model.has_bias": True,
        "model.optim.name": "adamw_fp32OptState",
        "model.optim.lr": 1.5e-4,
        "model.optim.weight_decay": 0.01,
        "model.optim.sched.warmup_steps": 750,
        "model.optim.sched.constant_steps": 80000,
        "model.optim.sched.min_lr": 1e-5,
    },
    "megatron_llama_7B": MEGATRON,
    "megatron_llama2_7B_SFT": {
        **MEGATRON,
        "trainer.max_steps": 5000,
        "trainer.val_check_interval": 500,
        "model.optim.sched.warmup_steps": 10,
        "exp_manager.resume_from_checkpoint": "$HOME/tmp/",
        "data.global_batch_size": 64,
        "data.data_prefix": GONE,
        "data.splits_string": GONE,
        "data.packing": True,
        "data.use_sft_style_data_module": True,
        "data.train_dir": "$HOME/training.jsonl",
        "data.val_dir": "$HOME/validation.jsonl",
        "data.dev_choose_samples": 10000,
        "model.weight_init_only": True,
        "model.activations_checkpoint_recompute": GONE,
    },
    "megatron_llama_70b": {
        **MEGATRON,
        **FULL,
        "trainer.num_nodes": 8,
        "distributed_strategy.pipeline_model_parallel_size": 16,
        "data.global_batch_size": 512,
        "model.num_layers": 80,
        "model.hidden_size": 8192,
        "model.ffn_hidden_size": 28672,
        "model.num_attention_heads": 64,
        "model.num_kv_heads": 8,
        "model.init_method_std": 0.02,
    },
    "megatron_mistral": {
        **MEGATRON,
        "name": "megatron_mistral",
        "model.ffn_hidden_size": 14336,
        "model.num_kv_heads": 8,
        "model.sliding_window_size": 4096,
        "model.activations_checkpoint_recompute": GONE,
    },
    "megatron_mixtral_8x7b": MEGATRON_MIXTRAL,
    "megatron_mixtral_8x7b_dropless": {**MEGATRON_MIXTRAL, **DROPLESS, "name": "megatron_mixtral_dropless"},
}
"""By the name of the conf file, without `_config.yaml`."""

_LLAMA3 = {
    "model_type": "llama",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.02,
    "vocab_size": 128256,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
_SIZES = {
    "8B": {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "intermediate_size": 14336},
    "70B": {"hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64, "intermediate_size": 28672},
    "405B": {"hidden_size": 16384, "num_hidden_layers": 126, "num_attention_heads": 128, "intermediate_size": 53248},
}
_LLAMA2 = {
    **_LLAMA3,
    **_SIZES["8B"],
    "intermediate_size": 11008,
    "num_key_value_heads": 32,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
}
_MIXTRAL = {
    **_LLAMA3,
    **_SIZES["8B"],
    "model_type": "mixtral",
    "vocab_size": 32000,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 32768,
}


def config_json(name: str) -> dict[str, Any]:
    """The config.json of the Hugging Face model that a conf file trains."""
    if "mixtral" in name:
        return _MIXTRAL
    size = next((s for s in ("405B", "70B") if s in name), "8B")
    return _LLAMA2 if name == "hf_llama_7B" else {**_LLAMA3, **_SIZES[size]}


def configuration(name: str) -> dict[str, Any]:
    """What the conf file of a name holds."""
    found = copy.deepcopy(BASE)
    found["exp_manager"]["name"] = DIFFERENCES[name].get("name", found["name"])
    change(found, DIFFERENCES[name])
    return found


def change(values: dict[str, Any], changes: dict[str, Any]) -> None:
    """Set keys by their dotted paths, or take them out (GONE)."""
    for path, value in changes.items():
        *sections, key = path.split(".")
        section = values
        for part in sections:
            section = section.setdefault(part, {})
        if value is GONE:
            section.pop(key, None)
        else:
            section[key] = copy.deepcopy(value)


def write(values: dict[str, Any], name: str, folder: Path) -> Path:
    """A conf file of that name in a folder."""
    file = folder / f"{name}_config.yaml"
    file.write_text(OmegaConf.to_yaml(OmegaConf.create(values)))
    return file


def with_files(name: str, folder: Path) -> dict[str, Any]:
    """`configuration` with paths, relative to the folder, of what it needs, which is written there."""
    found = configuration(name)
    data = found["data"]
    (folder / "config.json").write_text(json.dumps(config_json(name)))
    (folder / "config.jsonl").write_text('{"hidden_size": 1}\n')
    for place in ("tokenizer", "pretrained"):
        (folder / place).mkdir(exist_ok=True)
    if found["model_source"] == "hf":
        (folder / "rows.jsonl").write_text(json.dumps(_row(found)) + "\n")
        found["model"]["model_config"] = "config.json"
        data |= {key: "rows.jsonl" for key in ("train_dir", "val_dir") if data.get(key)}
    tokenizer = data.get("tokenizer") or {}
    if str(tokenizer.get("type")).startswith("/"):
        tokenizer["type"] = "./tokenizer"
    if found["model_source"] == "megatron":
        _write_megatron(folder)
        data |= {"data_prefix": [1.0, "book_text_document"]} if data.get("data_prefix") else {}
        tokenizer |= {key: key for key in ("vocab_file", "merge_file") if tokenizer.get(key)}
    if found["exp_manager"]["resume_from_checkpoint"]:
        found["exp_manager"]["resume_from_checkpoint"] = "pretrained"
    return found


def _write_megatron(folder: Path) -> None:
    """A set of 100 documents with 20,000 tokens each, all 0, and tokenizers of one letter."""
    with IndexedWriter(folder / "book_text_document", np.uint16, overwrite=True) as writer:
        for _ in range(100):
            writer.add(np.zeros(20_000, np.uint16))
            writer.end_document()
    made = Tokenizer(models.BPE({"a": 0, "</s>": 1}, []))
    made.save(str(folder / "tokenizer" / "tokenizer.json"))
    (folder / "vocab_file").write_text(json.dumps({"a": 0, "<|endoftext|>": 1}))
    (folder / "merge_file").write_text("#version: 0.2\n")


def _row(values: dict[str, Any]) -> dict[str, Any]:
    strategy = values.get("model_alignment_strategy")
    if strategy is not None:
        return {"input": "a", "output": "b"} if "sft" in strategy else {"prompt": "a", "chosen": "b", "rejected": "c"}
    return {key: [1] * values["model"]["encoder_seq_length"] for key in ("input_ids", "attention_mask", "labels")}
