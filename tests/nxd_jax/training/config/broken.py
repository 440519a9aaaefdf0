"""Configurations with one mistake each: what is changed, and the key and the words of the error."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tests.nxd_jax.training.config.conf_files import GONE

D, M, X, C = "distributed_strategy.", "model.", "exp_manager.", "exp_manager.checkpoint_callback_params."
GRANULARITY, AGAIN, CUTS = f"{M}activations_checkpoint_granularity", f"{M}activations_checkpoint_recompute", f"{M}pipeline_cuts"
TP, PP, CP = f"{D}tensor_model_parallel_size", f"{D}pipeline_model_parallel_size", f"{D}context_parallel_size"


@dataclass(frozen=True)
class Broken:
    """conf: the file. changes: keys to set, or GONE. key: of the error; it stands in the line that the error names, or if it is missing its section does.
    text: a part of the error. level: of what is found."""

    conf: str
    changes: dict[str, Any]
    key: str
    text: str
    level: str = "error"


STRATEGY = "model_alignment_strategy"
LLAMA, PIPELINE, MIXTRAL, GPT, LORA = "hf_llama_7B", "hf_llama3_70B", "hf_mixtral_8x7b", "megatron_gpt", "hf_llama3_8B_SFT_lora"

ERRORS = [
    # keys
    Broken(LLAMA, {"trainer.max_stesp": 5}, "trainer.max_stesp", "is no key of trainer; did you mean max_steps?"),
    Broken(LLAMA, {"exp_manager.save_xsr": True}, "exp_manager.save_xsr", "did you mean save_xser?"),
    Broken(
        LLAMA,
        {"trainer.max_steps": "20"},
        "trainer.max_steps",
        "'20' must be a whole number: it is text, so write 20 without quotes, or ${oc.decode:...}",
    ),
    Broken(LLAMA, {f"{D}zero1": "true"}, f"{D}zero1", "must be True or False or null: it is text, so write true without quotes"),
    Broken(LLAMA, {"trainer.zzz": 1}, "trainer.zzz", "is no key of trainer"),
    Broken(
        LLAMA,
        {f"{M}activations_checkpoint_granularty": "full"},
        f"{M}activations_checkpoint_granularty",
        "did you mean activations_checkpoint_granularity?",
    ),
    Broken(
        LLAMA,
        {f"{M}fusions.flash_atention": True},
        f"{M}fusions.flash_atention",
        "of model.fusions; did you mean flash_attention?",
    ),
    Broken(LLAMA, {"precison": {"type": "fp32"}}, "precison", "is no key of a configuration; did you mean precision?"),
    Broken(
        LLAMA,
        {"data.global_batch_size": GONE, f"{M}global_batch_size": 8},
        f"{M}global_batch_size",
        "counts as data.global_batch_size only",
    ),
    Broken(LLAMA, {"data.global_batch_size": GONE}, "data.global_batch_size", "is missing; it is a whole number"),
    Broken(LLAMA, {"precision.type": GONE}, "precision.type", "is missing; it is one of mixed_precision"),
    Broken(
        LLAMA,
        {f"{M}num_attention_heads": 16},
        f"{M}num_attention_heads",
        "16 counts in config.json only, which says num_attention_heads=32",
    ),
    # values
    Broken(LLAMA, {"trainer.max_steps": "many"}, "trainer.max_steps", "'many' must be a whole number"),
    Broken(LLAMA, {"data.micro_batch_size": 0}, "data.micro_batch_size", "0 must be at least 1"),
    Broken(LLAMA, {f"{D}zero1": "yes please"}, f"{D}zero1", "'yes please' must be True or False"),
    Broken(LLAMA, {"trainer": None}, "trainer", "must not be null"),
    Broken(LLAMA, {"precision.type": "mixed"}, "precision.type", "'mixed' must be one of mixed_precision, mixed_precisionSR"),
    Broken(
        LLAMA,
        {GRANULARITY: "some"},
        GRANULARITY,
        "must be one of selective, full or null",
    ),
    Broken(LLAMA, {"model_source": "hugging"}, "model_source", "'hugging' must be hf or megatron"),
    Broken(LLAMA, {"trainer.devices": "all"}, "trainer.devices", "'all' must be a number of cores on each node"),
    # interpolations
    Broken(
        LLAMA,
        {f"{M}num_layers": "${trainer.layers}"},
        f"{M}num_layers",
        "Interpolation key 'trainer.layers' not found",
    ),
    Broken(LLAMA, {f"{M}num_layers": "???"}, f"{M}num_layers", "must be given: it is ???"),
    Broken(LLAMA, {f"{M}num_layers": "${multiply:${name}, x}"}, f"{M}num_layers", "${multiply:${name}, x} cannot be resolved"),
    Broken(LLAMA, {CUTS: ["${none}"]}, CUTS, "Interpolation key 'none' not found"),
    # ranks
    Broken(LLAMA, {TP: 12}, TP, "32 * 1 = 32 ranks cannot be shared out to tp 12, pp 1, cp 1: they must be a multiple of 12"),
    Broken(LLAMA, {TP: 32, PP: 2}, TP, "they must be a multiple of 64"),
    Broken(
        "hf_llama3_8B",
        {f"{D}kv_replicator": 3},
        f"{D}kv_replicator",
        "3 with 8 K/V heads, 32 heads and tensor_model_parallel_size=32 must be 4",
    ),
    Broken(PIPELINE, {"trainer.devices": 64, TP: 64, "trainer.num_nodes": 16, f"{D}kv_replicator": 2}, f"{D}kv_replicator", "must be 8"),
    Broken("hf_llama3_8B", {"trainer.devices": 64, TP: 64}, TP, "64 must divide 32 attention heads"),
    Broken(LLAMA, {PP: 4, f"{D}virtual_pipeline_model_parallel_size": 2, TP: 2}, PP, "4 stages times 2 for 4 layers"),
    Broken(
        LLAMA,
        {f"{D}virtual_pipeline_model_parallel_size": 2},
        f"{D}virtual_pipeline_model_parallel_size",
        "2 needs pipeline_model_parallel_size above 1",
    ),
    Broken(
        PIPELINE,
        {f"{D}virtual_pipeline_model_parallel_size": 2, "data.global_batch_size": 8},
        f"{D}virtual_pipeline_model_parallel_size",
        "in groups of pipeline_model_parallel_size=8, and a step has 4",
    ),
    Broken(PIPELINE, {CUTS: ["model.layers.3"]}, CUTS, "1 cuts for 8 stages: there must be 7"),
    Broken(PIPELINE, {CUTS: [f"layer{n}" for n in range(7)]}, CUTS, "a cut is named model.layers.N"),
    Broken(
        PIPELINE,
        {CUTS: [f"model.layers.{n}" for n in (9, 19, 29, 39, 49, 59, 79)]},
        CUTS,
        "layers.79 leaves nothing behind it",
    ),
    Broken(PIPELINE, {CUTS: [f"model.layers.{n}" for n in (9, 19, 29, 39, 49, 49, 69)]}, CUTS, "must increase"),
    Broken(
        "hf_llama3_70B_CP",
        {f"{M}fusions.flash_attention": True},
        f"{M}fusions.ring_attention",
        "True together with model.fusions.flash_attention: True",
    ),
    Broken("hf_llama3_70B_CP", {f"{M}fusions.ring_attention": False}, CP, "2 needs model.fusions.ring_attention: True"),
    Broken(
        "hf_llama3_70B_CP", {f"{M}encoder_seq_length": 8191}, f"{M}encoder_seq_length", "8191 must be a multiple of context_parallel_size=2"
    ),
    Broken(GPT, {CP: 2, f"{M}fusions.ring_attention": True}, CP, "Megatron models are not for context parallelism"),
    Broken(LLAMA, {f"{M}encoder_seq_length": 4092}, f"{M}encoder_seq_length", "4092 must be a multiple of tensor_model_parallel_size=8"),
    # batches and the Trainer
    Broken(LLAMA, {"data.global_batch_size": 1022}, "data.global_batch_size", "1022 must be a multiple of data.micro_batch_size=1 times 4"),
    Broken(LLAMA, {"data.global_batch_size": 2}, "data.global_batch_size", "such as 4"),
    Broken(LLAMA, {"trainer.accumulate_grad_batches": 4}, "trainer.accumulate_grad_batches", "must be left out"),
    Broken(LLAMA, {"trainer.gradient_clip_algorithm": "value"}, "trainer.gradient_clip_algorithm", "must be left out"),
    Broken(LLAMA, {"trainer.enable_model_summary": True}, "trainer.enable_model_summary", "True is not supported"),
    Broken(LLAMA, {"trainer.limit_val_batches": 2.0}, "trainer.limit_val_batches", "give 2 for so many batches"),
    Broken(LLAMA, {"trainer.val_check_interval": 50.0}, "trainer.val_check_interval", "give 50 for so many steps"),
    Broken(LLAMA, {"trainer.max_steps": -1, f"{M}optim.sched": None}, "trainer.max_steps", "training would never end"),
    Broken(LLAMA, {"trainer.max_steps": -1}, "trainer.max_steps", "needs the number of steps"),
    Broken(
        LLAMA,
        {"trainer.val_check_interval": 0.5, "trainer.check_val_every_n_epoch": None},
        "trainer.val_check_interval",
        "0.5 is a part of an epoch, and needs trainer.check_val_every_n_epoch: 1",
    ),
    Broken(LLAMA, {"trainer.val_check_interval": 0}, "trainer.val_check_interval", "0 must be above 0; trainer.limit_val_batches=0"),
    Broken(LLAMA, {"trainer.precision": "bf16-mixed"}, "trainer.precision", "'bf16-mixed' must be 32, or left out"),
    Broken(LLAMA, {"trainer.max_time": "1 hour"}, "trainer.max_time", "'1 hour' must be DD:HH:MM:SS"),
    Broken(LLAMA, {f"{X}max_time_per_run": {"hour": 1}}, f"{X}max_time_per_run", "such as {hours: 2}"),
    Broken(LLAMA, {"trainer.gradient_clip_val": "1.0"}, "trainer.gradient_clip_val", "'1.0' must be a number, without quotes"),
    # the model
    Broken(LLAMA, {f"{M}num_layers": 0}, f"{M}num_layers", "0 must be above 0, or -1 for config.json's"),
    Broken(LLAMA, {f"{M}rope_theta": 0}, f"{M}rope_theta", "0 must be above 0"),
    Broken(MIXTRAL, {"name": "moe"}, "name", "give a name with mixtral in it"),
    Broken(LLAMA, {f"{M}hidden_size": 4100}, f"{M}hidden_size", "4100 must be a multiple of 32 attention heads"),
    Broken("hf_llama3_8B", {"trainer.devices": 30, "trainer.num_nodes": 1, TP: 5}, TP, "5 must divide vocab_size=128256"),
    Broken(
        LLAMA,
        {AGAIN: ["CoreAtention"]},
        AGAIN,
        "did you mean CoreAttention?",
    ),
    Broken(LLAMA, {f"{M}encoder_seq_length": GONE}, f"{M}encoder_seq_length", "is missing; it is a whole number"),
    # experts
    Broken(LLAMA, {f"{D}expert_model_parallel_size": 4}, f"{D}expert_model_parallel_size", "4 needs a model with experts"),
    Broken(LLAMA, {f"{D}expert_model_parallel_size": 3}, f"{D}expert_model_parallel_size", "3 must divide the 4 ranks"),
    Broken(MIXTRAL, {f"{D}expert_model_parallel_size": 16, TP: 4}, f"{D}expert_model_parallel_size", "16 must divide the 8 experts"),
    Broken(MIXTRAL, {f"{M}moe.top_k": 9}, f"{M}moe.top_k", "9 of 8 experts"),
    Broken(MIXTRAL, {f"{M}moe.capacity_factor": 0.0}, f"{M}moe.capacity_factor", "0.0 must be above 0, or model.moe.dropless: True"),
    Broken(MIXTRAL, {f"{M}moe.routing_algorithm": "sinkhorn"}, f"{M}moe.routing_algorithm", "chooses by top_k"),
    Broken(
        "megatron_mixtral_8x7b",
        {f"{M}moe.routing_algorithm": "sinkhorn"},
        f"{M}moe.routing_algorithm",
        "sinkhorn needs model.moe.top_k: 1, which is 2",
    ),
    Broken("megatron_mixtral_8x7b_dropless", {f"{M}moe.glu_mlp": False}, f"{M}moe.dropless", "True needs model.moe.glu_mlp: True"),
    Broken(MIXTRAL, {f"{M}moe.glu_mlp": False}, f"{M}moe.glu_mlp", "has gated experts"),
    Broken(MIXTRAL, {f"{D}token_shuffle_group_size": 4}, f"{D}token_shuffle_group_size", "4 must divide the 2 data-parallel ranks"),
    Broken(
        "megatron_mixtral_8x7b_dropless",
        {f"{M}activation": "gelu"},
        f"{M}moe.dropless",
        "needs the activation silu or swiglu, which is gelu",
    ),
    Broken(
        "megatron_mixtral_8x7b",
        {f"{D}token_shuffle_group_size": 3},
        f"{D}token_shuffle_group_size",
        "3 must divide the 4 data-parallel ranks",
    ),
    Broken(LLAMA, {f"{M}moe": {"num_experts": 8, "capacity_factor": 1.0}}, f"{M}moe", "chooses the llama model, which has no experts"),
    Broken(
        MIXTRAL,
        {f"{M}moe.capacity_factor": "1.25"},
        f"{M}moe.capacity_factor",
        "must be a number, without quotes or null: it is text, so write 1.25",
    ),
    # optimizer and learning rates
    Broken(LLAMA, {f"{M}optim.name": "adamz"}, f"{M}optim.name", "'adamz' must be one of adamw"),
    Broken(LLAMA, {f"{M}optim.name": "novograd"}, f"{M}optim.name", "NovoGrad is no optimizer of torch"),
    Broken(LLAMA, {f"{M}optim.name": None}, f"{M}optim.name", "is missing; it is one of adamw"),
    Broken(LLAMA, {f"{M}optim": None}, f"{M}optim", "is missing: it names the optimizer"),
    Broken(LLAMA, {f"{M}optim.lr": "fast"}, f"{M}optim.lr", "'fast' must be a number of at least 0"),
    Broken(LLAMA, {f"{M}optim.lr": float("nan")}, f"{M}optim.lr", "nan must be a number of at least 0"),
    Broken(LLAMA, {f"{M}optim.lr": GONE}, f"{M}optim.lr", "is missing: the learning rate"),
    Broken(LLAMA, {f"{M}optim.wieght_decay": 0.1}, f"{M}optim.wieght_decay", "did you mean weight_decay?"),
    Broken(LLAMA, {f"{M}optim.betas": [0.9, 1.5]}, f"{M}optim.betas", "[0.9, 1.5] must be two numbers from 0 to below 1"),
    Broken(
        LLAMA,
        {f"{M}optim.amsgrad": "false", f"{M}optim.name": "adamw"},
        f"{M}optim.amsgrad",
        "'false' must be True or False, without quotes",
    ),
    Broken(
        LLAMA,
        {f"{M}optim": {"name": "sgd", "lr": 0.1, "nesterov": True}},
        f"{M}optim",
        "sgd refuses its options: Nesterov momentum requires a momentum",
    ),
    Broken(LLAMA, {f"{M}optim.eps": [None, 1e-3]}, f"{M}optim.eps", "[None, 0.001] must be a number"),
    Broken(LLAMA, {f"{M}optim.sched.name": "CosineAnealing"}, f"{M}optim.sched.name", "did you mean 'CosineAnnealing'?"),
    Broken(LLAMA, {f"{M}optim.sched.min_lr": 0.0}, f"{M}optim.sched.min_lr", "LinearAnnealingWithWarmUp takes warmup_steps, max_steps"),
    Broken("hf_llama3_8B_ORPO", {f"{M}optim.sched.warmup_steps": "ten"}, f"{M}optim.sched.warmup_steps", "'ten' must be a number"),
    Broken("hf_llama3.1_8B", {f"{M}optim.sched.min_lr": 1e-3}, f"{M}optim.sched.min_lr", "0.001 must not be above model.optim.lr=1.5e-05"),
    Broken(LLAMA, {f"{M}optim.sched.warmup_steps": 10001}, f"{M}optim.sched.warmup_steps", "10001 is more than trainer.max_steps=10000"),
    Broken(
        "hf_llama3.1_8B",
        {f"{M}optim.sched.warmup_ratio": 0.1},
        f"{M}optim.sched.warmup_ratio",
        "give warmup_steps or warmup_ratio, not both",
    ),
    Broken("hf_llama3.1_8B", {f"{M}optim.sched.min_lr": -1e-6}, f"{M}optim.sched.min_lr", "-1e-06 must not be negative"),
    Broken(LLAMA, {f"{M}optim.sched": "CosineAnnealing"}, f"{M}optim.sched", "'CosineAnnealing' must be keys with values"),
    Broken(LLAMA, {f"{M}optim.sched.warmup_steps": 0.1}, f"{M}optim.sched.warmup_steps", "0.1 must be a whole number of steps"),
    Broken(LLAMA, {f"{M}optim.sched.last_epoch": 5}, f"{M}optim.sched.last_epoch", "5 must be left out: a checkpoint says at which step"),
    Broken(
        LLAMA,
        {f"{M}optim.sched": {"name": "PolynomialDecayAnnealing", "cycle": 1}},
        f"{M}optim.sched.cycle",
        "1 must be True or False",
    ),
    Broken(LLAMA, {f"{M}optim.sched.name": ["a"]}, f"{M}optim.sched.name", "must be one of LinearAnnealingWithWarmUp"),
    # fine-tuning
    Broken("hf_llama3_8B_DPO", {f"{STRATEGY}.dpo.kl_beta": 0}, f"{STRATEGY}.dpo.kl_beta", "0 must be above 0: with 0 nothing is learned"),
    Broken("hf_llama3_8B_ORPO", {f"{STRATEGY}.orpo.beta": -0.1}, f"{STRATEGY}.orpo.beta", "-0.1 must not be negative"),
    Broken(LORA, {f"{STRATEGY}.peft.lora_alpha": 0}, f"{STRATEGY}.peft.lora_alpha", "0 must be above 0"),
    Broken(LORA, {f"{STRATEGY}.peft.lora_dropout": 1.5}, f"{STRATEGY}.peft.lora_dropout", "1.5 must be below 1"),
    Broken(
        LORA,
        {f"{STRATEGY}.peft.merge_lora": True, f"{STRATEGY}.peft.save_lora_base": False},
        f"{STRATEGY}.peft.merge_lora",
        "True with save_lora_base: False saves nothing",
    ),
    Broken(LLAMA, {f"{X}ema": {"enable": True, "decay": 1.5}}, f"{X}ema.decay", "1.5 must be between 0 and 1"),
    Broken(LLAMA, {f"{X}ema": {"enable": True, "every_n_steps": 0}}, f"{X}ema.every_n_steps", "0 must be at least 1"),
    Broken(
        MIXTRAL,
        {f"{M}moe.top_k": 1, f"{M}moe.normalize_top_k_affinities": True},
        f"{M}moe.normalize_top_k_affinities",
        "True with top_k: 1",
    ),
    Broken(LORA, {f"{STRATEGY}.peft.rank": 4}, f"{STRATEGY}.peft.rank", "is no key of model_alignment_strategy.peft"),
    Broken(LORA, {f"{STRATEGY}.peft.init_lora_weights": "zero"}, f"{STRATEGY}.peft.init_lora_weights", "must be one of default, gaussian"),
    Broken(LORA, {f"{STRATEGY}.peft.target_modules": []}, f"{STRATEGY}.peft.target_modules", "[] must be some of qkv_proj, o_proj"),
    # exp_manager
    Broken(LLAMA, {f"{X}log_global_rank_0_only": True}, f"{X}log_global_rank_0_only", "True together with log_local_rank_0_only"),
    Broken(LLAMA, {f"{X}create_wandb_logger": True}, f"{X}create_wandb_logger", "True needs project in wandb_logger_kwargs"),
    Broken(
        LLAMA, {f"{C}train_time_interval": 60.0}, f"{C}train_time_interval", "give every_n_train_steps (10) or train_time_interval (60.0)"
    ),
    Broken(LLAMA, {f"{C}every_n_train_steps": -5}, f"{C}every_n_train_steps", "-5 must be a number of steps between two checkpoints"),
    Broken(LLAMA, {f"{C}every_n_epochs": -1}, f"{C}every_n_epochs", "-1 must be a number of epochs between two checkpoints"),
    Broken(LLAMA, {f"{C}save_top_k": -2}, f"{C}save_top_k", "-2 must be a number of checkpoints, or -1 for all"),
    Broken(LLAMA, {f"{C}mode": "min"}, f"{C}mode", "deletes each new one; use max"),
    # files
    Broken(LLAMA, {f"{M}model_config": "nowhere.json"}, f"{M}model_config", "there is no file nowhere.json"),
    Broken(LLAMA, {f"{M}model_config": "rows.jsonl"}, f"{M}model_config", "rows.jsonl has no sizes of a model, such as hidden_size"),
    Broken(LLAMA, {f"{M}model_config": None}, f"{M}model_config", "must name a Hugging Face config.json"),
    Broken(LLAMA, {"data.train_dir": "no/set"}, "data.train_dir", "there is no no/set; override it with data.train_dir=/path/to/set"),
    Broken(LLAMA, {"data.train_dir": GONE}, "data.train_dir", "must name the set to train on"),
    Broken(LLAMA, {"data.tokenizer": "./nothing"}, "data.tokenizer", "there is no tokenizer nothing"),
    Broken(GPT, {"data.tokenizer.vocab_file": "none.json"}, "data.tokenizer.vocab_file", "there is no file none.json"),
    Broken(LLAMA, {f"{X}resume_from_checkpoint": "no/tag"}, f"{X}resume_from_checkpoint", "there is no checkpoint no/tag"),
    Broken(LLAMA, {f"{X}files_to_copy": ["no.txt"]}, f"{X}files_to_copy", "there is no file no.txt"),
    # Megatron
    Broken(GPT, {f"{M}megatron_amp_o2": True}, f"{M}megatron_amp_o2", "True is refused: precision.type says the precision"),
    Broken(GPT, {f"{D}zero1": False}, f"{D}zero1", "Megatron models train with ZeRO-1 only"),
    Broken(GPT, {f"{M}fusions.flash_attention": True}, f"{M}fusions.flash_attention", "no blockwise attention"),
    Broken(GPT, {PP: 4}, f"{M}share_embeddings_and_output_weights", "on different stages"),
    Broken(
        "megatron_llama_7B",
        {f"{M}rotary_percentage": 0.04},
        f"{M}rotary_percentage",
        "0.04 must be above 0, at most 1, and turn an even number",
    ),
    Broken(
        GPT,
        {f"{M}transformer_block_type": "normformer"},
        f"{M}transformer_block_type",
        "which tensor_model_parallel_size=8 ranks share out",
    ),
    Broken(GPT, {f"{M}fp16_lm_cross_entropy": True}, f"{M}fp16_lm_cross_entropy", "True is not supported: the loss is computed in float32"),
    Broken("megatron_mixtral_8x7b", {f"{M}activation": "geglu"}, f"{M}activation", "geglu must be swiglu: the layers have experts"),
    Broken("megatron_mixtral_8x7b", {f"{M}has_bias": True}, f"{M}has_bias", "True must be False: the layers have experts"),
    Broken(
        "megatron_mixtral_8x7b", {f"{M}moe.dropout": 0.1}, f"{M}moe.dropout", "0.1 must be 0: experts of Megatron models have no dropout"
    ),
    Broken("megatron_mixtral_8x7b", {f"{M}moe.frequency": 33}, f"{M}moe.frequency", "33: every how manieth of 32 layers has experts"),
    Broken("megatron_mixtral_8x7b", {f"{M}moe.glu_mlp": False}, f"{M}moe.glu_mlp", "False: the experts of Megatron models are gated"),
    Broken("megatron_llama_7B", {f"{M}num_layers": 30, PP: 4}, PP, "model.num_layers=30 must be a multiple of 4 stages"),
    Broken("megatron_mistral", {TP: 16}, f"{M}num_kv_heads", "8 must be a multiple of tensor_model_parallel_size=16"),
    Broken("megatron_mistral", {f"{M}num_kv_heads": 12}, f"{M}num_kv_heads", "32 attention heads must be a multiple of 12 K/V heads"),
    Broken(GPT, {f"{M}ffn_hidden_size": 16383}, f"{M}ffn_hidden_size", "16383 must be a multiple of tensor_model_parallel_size=8"),
    Broken(GPT, {f"{M}max_position_embeddings": 1024}, f"{M}max_position_embeddings", "each learned: it must be 2048 at least"),
    Broken(GPT, {"trainer.limit_val_batches": 3.0}, "trainer.limit_val_batches", "3.0 must be a whole number of batches"),
    Broken(GPT, {"trainer.precision": 16}, "trainer.precision", "16 must be 32"),
    Broken(GPT, {"data.reset_attention_mask": True}, "data.reset_attention_mask", "are not supported"),
    Broken(GPT, {"data.fine_tuning": True}, "data.fine_tuning", "True is not supported"),
    Broken(GPT, {"data.seq_length": 1024}, "data.seq_length", "1024 must be model.encoder_seq_length=2048"),
    Broken(GPT, {"data.data_prefix": ["nothing"]}, "data.data_prefix", "nothing: there is no nothing.idx and no nothing.bin; override it"),
    Broken(GPT, {"data.data_prefix": [1.0, "config"]}, "data.data_prefix", "there is no config.idx and no config.bin"),
    Broken(GPT, {"data.data_prefix": [1.0, "a", 2.0]}, "data.data_prefix", "has 3 members, and every prefix needs a weight before it"),
    Broken(GPT, {"data.data_prefix": {"validation": ["a"]}}, "data.data_prefix", "has the keys validation: they must be train"),
    Broken(GPT, {"data.splits_string": "98,2"}, "data.splits_string", "'98,2' must be three weights for training, validation and test"),
    Broken(
        GPT,
        {"data.splits_string": "0,1,1"},
        "data.splits_string",
        "0,1,1 leaves none of the 100 documents of book_text_document for training",
    ),
    Broken(
        GPT,
        {"trainer.limit_val_batches": 1.0},
        "data.splits_string",
        "validation has 9 samples of book_text_document, and a batch needs data.global_batch_size=1024",
    ),
    Broken(GPT, {"data.tokenizer.library": "tabular"}, "data.tokenizer.library", "tabular is one of NeMo's, and not supported"),
    Broken(GPT, {"data.tokenizer.type": "BertWordPieceCase"}, "data.tokenizer.type", "BertWordPieceCase: with library megatron it must be"),
    Broken(GPT, {"data.tokenizer.merge_file": None}, "data.tokenizer.merge_file", "is missing: library megatron needs it"),
    Broken(GPT, {"data.tokenizer.merge_file": "config.json"}, "data.tokenizer", "vocab_file and config.json are no vocabulary and merges"),
    Broken("megatron_llama_7B", {"data.eod_mask_loss": True}, "data.eod_mask_loss", "True needs a tokenizer with an end of text"),
    Broken(GPT, {"data.tokenizer": GONE}, "data.tokenizer", "is missing: the size of the vocabulary"),
    Broken(GPT, {"data.dataloader_type": GONE}, "data.dataloader_type", "is missing; it is single"),
    Broken(GPT, {"data.dataloader_type": "cyclic", "data.drop_last": False}, "data.drop_last", "False is not for dataloader_type: cyclic"),
    Broken(
        GPT,
        {"data.dataloader_type": "cyclic", "data.pad_samples_to_global_batch_size": True},
        "data.pad_samples_to_global_batch_size",
        "True is not for dataloader_type: cyclic",
    ),
    Broken("megatron_llama2_7B_SFT", {}, "data.data_prefix", "data.train_dir is read with model_alignment_strategy only"),
    # alignment
    Broken(LORA, {f"{D}zero1": True}, f"{D}zero1", "must be False with LoRA"),
    Broken(LORA, {"precision.type": "mixed_precision"}, "precision.type", "must be autocast with LoRA"),
    Broken(
        LORA,
        {"model_alignment_strategy.peft.target_modules": ["q"]},
        "model_alignment_strategy.peft.target_modules",
        "'q' must be one of qkv_proj",
    ),
    Broken("hf_llama3_8B_SFT", {}, "data.seq_length", "4096: rows have so many tokens, and the model takes model.encoder_seq_length=8192"),
    Broken("hf_llama3_8B_DPO", {PP: 2, TP: 16}, "model_alignment_strategy.dpo", "dpo needs pipeline_model_parallel_size: 1, which is 2"),
    Broken(
        "hf_llama3_8B_ORPO", {"distributed_strategy.context_parallel_size": 2}, f"{STRATEGY}.orpo", "orpo needs context_parallel_size: 1"
    ),
    Broken(
        "hf_llama3_8B_SFT",
        {f"{STRATEGY}.sft.separate_documents": True, "distributed_strategy.context_parallel_size": 2},
        f"{STRATEGY}.sft.separate_documents",
        "True with context_parallel_size: 2: ring attention is causal only",
    ),
    Broken("hf_llama3_8B_SFT", {"data.bad_rows": "skip"}, "data.bad_rows", "'skip' must be"),
    Broken(
        "hf_llama3_8B_DPO",
        {"data.train_dir": "config.jsonl"},
        "data.train_dir",
        "has the columns hidden_size, and dpo needs prompt, chosen",
    ),
    Broken("hf_llama3_8B_DPO", {"model_alignment_strategy.orpo": {"beta": 0.1}}, "model_alignment_strategy.orpo", "there are dpo and orpo"),
    Broken("hf_llama3_8B_ORPO", {"data.tokenizer": GONE}, "data.tokenizer.type", "is missing: model_alignment_strategy needs it"),
    Broken("hf_llama3_8B_ORPO", {"data.alignment_strategy": {"sft": {}}}, "data.alignment_strategy", "was moved: model_alignment_strategy"),
]

WARNINGS = [
    Broken(LLAMA, {"remark": "mine"}, "remark", "is no key of a configuration, and nothing reads it", "warning"),
    Broken(
        "megatron_llama_7B",
        {"data.reset_position_ids": True},
        "data.reset_position_ids",
        "True has no effect: positions are rotary",
        "warning",
    ),
    Broken(LLAMA, {f"{M}micro_batch_size": 4}, f"{M}micro_batch_size", "counts in data.micro_batch_size only, which is 1", "warning"),
    Broken(LLAMA, {"trainer.devices": 16}, "trainer.devices", "16: no machine has so many cores", "warning"),
    Broken(LLAMA, {"trainer.lnc": 2}, "trainer.lnc", "2 is of trn2.48xlarge", "warning"),
    Broken(LLAMA, {f"{M}fusions.ring_attention": True}, f"{M}fusions.ring_attention", "context_parallel_size is 1", "warning"),
    Broken(
        LLAMA, {"trainer.gradient_clip_val": 0.0}, f"{X}log_gradient_norm", "has no effect without trainer.gradient_clip_val", "warning"
    ),
    Broken(LLAMA, {TP: 1}, f"{D}sequence_parallel", "True has nothing to do", "warning"),
    Broken(LLAMA, {CUTS: ["model.layers.1"]}, CUTS, "nothing is cut", "warning"),
    Broken(PIPELINE, {"data.global_batch_size": 8}, "data.global_batch_size", "4 micro-batches for 8 pipeline stages", "warning"),
    Broken(LLAMA, {f"{D}zero1": False}, f"{D}zero1", "keeps float32 master weights in the ZeRO-1 optimizer, so there are none", "warning"),
    Broken(
        LLAMA,
        {f"{D}zero1": False, f"{C}use_master_weights_in_ckpt": True},
        f"{C}use_master_weights_in_ckpt",
        "there are no master weights",
        "warning",
    ),
    Broken(
        LLAMA, {"precision.parallel_layers_reduce_dtype": "fp16"}, "precision.parallel_layers_reduce_dtype", "is read as bf16", "warning"
    ),
    Broken(
        LLAMA,
        {"precision.type": "manual", "precision.xla_use_bf16": None},
        "precision.type",
        "manual: xla_use_bf16 is not given",
        "warning",
    ),
    Broken(LLAMA, {f"{M}max_position_embeddings": 2048}, f"{M}max_position_embeddings", "was not made for positions above", "warning"),
    Broken(
        LLAMA,
        {GRANULARITY: None},
        AGAIN,
        "must be selective for this list",
        "warning",
    ),
    Broken(LLAMA, {GRANULARITY: "full"}, AGAIN, "granularity is full", "warning"),
    Broken(LLAMA, {AGAIN: None}, GRANULARITY, "CoreAttention is computed again", "note"),
    Broken(LLAMA, {"name": "hf_mixtral"}, f"{M}model_config", "is of model_type llama, and is read as a mixtral model", "warning"),
    Broken(MIXTRAL, {f"{M}moe.capacity_factor": GONE}, f"{M}moe.capacity_factor", "is not given, and 1.0", "warning"),
    Broken(MIXTRAL, {CP: 2, f"{M}fusions.ring_attention": True}, CP, "the original has no context parallelism for Mixtral", "warning"),
    Broken("hf_llama3_8B", {f"{M}qkv_linear": False}, f"{D}kv_replicator", "4 needs model.qkv_linear: True in the original", "warning"),
    Broken(LLAMA, {}, f"{M}do_layer_norm_weight_decay", "weights of norms are decayed; the original does the opposite", "note"),
    Broken(MIXTRAL, {}, f"{D}kv_replicator", "each is held 4 times (kv_replicator: 4; the original stops)", "warning"),
    Broken(MIXTRAL, {}, f"{C}every_n_train_steps", "200000 is more than trainer.max_steps=22500", "warning"),
    Broken(MIXTRAL, {f"{M}moe.capacity_factor": 0.5}, f"{M}moe.capacity_factor", "0.5 is below 1", "warning"),
    Broken(MIXTRAL, {f"{M}moe.dropless": True}, f"{M}moe.capacity_factor", "2.0 has no effect with dropless: True", "warning"),
    Broken(GPT, {}, f"{M}optim.sched.constant_steps", "80000 and warmup_steps=750 are more than trainer.max_steps=20000", "warning"),
    Broken("hf_llama3.1_8B", {f"{M}optim.sched.monitor": "val_loss"}, f"{M}optim.sched.monitor", "has no effect", "warning"),
    Broken(
        LLAMA,
        {f"{M}optim.sched": {"name": "ExponentialLR", "gamma": 0.9}},
        f"{M}optim.sched.name",
        "ExponentialLR takes a step at the end of each epoch",
        "note",
    ),
    Broken(
        LLAMA,
        {f"{M}optim.sched.max_steps": 7},
        f"{M}optim.sched.max_steps",
        "7 has no effect: it is always trainer.max_steps=10000",
        "warning",
    ),
    Broken(
        LLAMA, {f"{X}explicit_log_dir": "logs", f"{X}exp_dir": "other"}, f"{X}exp_dir", "explicit_log_dir says the whole folder", "warning"
    ),
    Broken(LLAMA, {f"{C}monitor": "val_loss"}, f"{C}monitor", "there is no validation", "warning"),
    Broken(
        LLAMA,
        {"trainer.limit_val_batches": 2, "trainer.val_check_interval": 5},
        "trainer.limit_val_batches",
        "data.val_dir is not set",
        "warning",
    ),
    Broken(
        LLAMA,
        {"trainer.limit_val_batches": 2, "trainer.check_val_every_n_epoch": 1},
        "trainer.val_check_interval",
        "10001 is more than max_steps=10000: there is no validation",
        "warning",
    ),
    Broken(LLAMA, {"data.packing": True}, "data.packing", "is of fine-tuning, and there is no model_alignment_strategy", "warning"),
    Broken(
        LLAMA,
        {f"{M}num_layers": 32, AGAIN: ["LlamaMLP"]},
        "distributed_strategy",
        "a core needs about",
        "warning",
    ),
    Broken(
        GPT,
        {"data.splits_string": "1,0,0"},
        "data.splits_string",
        "leaves none of the 100 documents of book_text_document for validation",
        "warning",
    ),
    Broken(
        "hf_llama3_8B_SFT",
        {f"{STRATEGY}.sft": {"packing": False, "separate_documents": True}},
        f"{STRATEGY}.sft.separate_documents",
        "has no effect without packing",
        "warning",
    ),
    # good to know
    Broken(
        "hf_llama3_8B_SFT",
        {f"{STRATEGY}.sft.separate_documents": True},
        f"{STRATEGY}.sft.separate_documents",
        "attention is computed without fusions.flash_attention",
        "note",
    ),
    Broken(LLAMA, {f"{X}resume_from_checkpoint": "first"}, f"{X}resume_from_checkpoint", "goes on from the run's own newest one", "note"),
    Broken(LLAMA, {"precision.type": "mixed_precision_SR"}, "precision.type", "mixed_precision_SR is mixed_precisionSR", "note"),
    Broken(LLAMA, {f"{M}vocab_size": 32000}, f"{M}vocab_size", "counts in config.json only, which says the same", "note"),
    Broken(LLAMA, {f"{M}optim.weight_decay": 0.1}, f"{M}optim.weight_decay", "0.1 is used; the original uses 0.01", "note"),
    Broken(LLAMA, {f"{M}use_emha": False}, f"{M}use_emha", "nothing reads it", "note"),
    Broken(
        "hf_mixtral_8x7b_dropless",
        {GRANULARITY: "selective", AGAIN: ["MoE"]},
        AGAIN,
        "sent to experts again",
        "note",
    ),
]
