"""Keys of `data`."""

from __future__ import annotations

from nxd_jax.training.config.keys.kinds import Key, anything, listing, section, switch, text, whole
from nxd_jax.training.data.alignment import bad_rows

TOKENIZER: dict[str, Key] = {
    "library": text(only="megatron"),
    "type": text(),
    "model": text(only="megatron"),
    "vocab_file": text(only="megatron"),
    "merge_file": text(only="megatron"),
    "delimiter": text(only="megatron"),
    "sentencepiece_legacy": switch(only="megatron"),
    "use_fast": switch(only="megatron"),
}

_PATHS = Key(("str", "list"))

DATA: dict[str, Key] = {
    "_target_": text(),
    "micro_batch_size": whole(1, null=False, required=True),
    "global_batch_size": whole(1, null=False, required=True),
    "train_dir": _PATHS,
    "val_dir": _PATHS,
    "test_dir": _PATHS,
    "shuffle": switch(),
    "seed": whole(0),
    "streaming": switch(),
    "text_column": text(),
    "tokenizer": Key(("str", "dict"), inside=TOKENIZER),
    "seq_length": whole(1),
    "dev_choose_samples": whole(1),
    "chat_template": Key(("bool", "str")),
    "bad_rows": text(*bad_rows.CHOICES),
    "long_rows": text(*bad_rows.LONG),
    "dataset_name": text(),
    "subset_name": text(),
    "prompt_name": text(),
    "packing": switch(unread="model_alignment_strategy.sft.packing is what joins short rows"),
    "use_sft_style_data_module": switch(unread="model_alignment_strategy chooses the data module"),
    # model_source: megatron
    "data_prefix": anything(only="megatron"),
    "index_mapping_dir": text(only="megatron"),
    "data_impl": text("mmap", only="megatron"),
    "splits_string": text(only="megatron"),
    "skip_warmup": switch(only="megatron"),
    "num_workers": whole(0, only="megatron"),
    "dataloader_type": text("single", "cyclic", only="megatron"),
    "reset_position_ids": switch(only="megatron"),
    "reset_attention_mask": switch(only="megatron"),
    "eod_mask_loss": switch(only="megatron"),
    "validation_drop_last": switch(only="megatron"),
    "drop_last": switch(only="megatron"),
    "no_seqlen_plus_one_input_tokens": switch(only="megatron"),
    "pad_samples_to_global_batch_size": switch(only="megatron"),
    "fine_tuning": switch(only="megatron"),
}

_PREFERENCES: dict[str, Key] = {
    "max_prompt_length": whole(1),
    "truncation_mode": text("keep_start", "keep_end"),
}

ALIGNMENT: dict[str, Key] = {
    "sft": section({"packing": switch(), "separate_documents": switch()}),
    "dpo": section(
        {
            **_PREFERENCES,
            "kl_beta": Key(("float",)),
            "loss_type": text("sigmoid", unread="there is one loss"),
            "precompute_ref_log_probs": switch(unread="the reference is always computed before"),
        }
    ),
    "orpo": section({**_PREFERENCES, "beta": Key(("float",))}),
    "peft": section(
        {
            "lora_rank": whole(1),
            "lora_alpha": Key(("float",)),
            "lora_dropout": Key(("float",), low=0),
            "lora_bias": text("none", "all", "lora_only"),
            "lora_verbose": switch(),
            "target_modules": listing(),
            "load_lora_from_ckpt": switch(),
            "save_lora_base": switch(),
            "merge_lora": switch(),
            "save_lora_config_adapter": switch(),
            "merge_sharded_lora": switch(),
            # not in the original's files: fields of NxD's LoraConfig
            "use_rslora": switch(),
            "init_lora_weights": text("default", "gaussian"),
            "modules_to_save": listing(),
            "lora_save_dir": text(),
            "lora_load_tag": text(),
        }
    ),
}
"""`model_alignment_strategy`."""

LORA_TARGETS = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
