"""LoRA from a YAML file: `model_alignment_strategy.peft`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nxd_jax.modules.lora import LoraConfig
from nxd_jax.training.config.loading import plain

_NAMES = {"lora_bias": "bias"}
"""Keys that `LoraConfig` calls otherwise."""
_DEFAULTS: dict[str, Any] = {
    "lora_rank": 16,
    "lora_alpha": 32,
    "lora_dropout": 0.05,
    "bias": "none",
    "lora_verbose": False,
    "target_modules": ["qkv_proj"],
    "load_lora_from_ckpt": False,
    "save_lora_base": False,
    "merge_lora": False,
    "save_lora_config_adapter": True,
    "merge_sharded_lora": False,
}


def lora_config(peft: Mapping[str, Any]) -> LoraConfig:
    """The adapters that a section asks for, with the original's defaults. Raises TypeError and ValueError, as `LoraConfig` does."""
    given = {_NAMES.get(name, name): value for name, value in plain(peft).items() if value is not None}
    return LoraConfig(**{**_DEFAULTS, **given})
