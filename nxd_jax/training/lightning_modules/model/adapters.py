"""LoRA from a YAML file: `model_alignment_strategy.peft`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig

from nxd_jax.modules.lora import LoraConfig
from nxd_jax.training.config.keys import ALIGNMENT
from nxd_jax.training.config.loading import plain
from nxd_jax.training.utils.utils import get_attribute_from_cfg

PEFT = "model_alignment_strategy.peft"

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


def lora_config(cfg: Mapping[str, Any] | DictConfig) -> LoraConfig:
    """The adapters that a configuration asks for, with the original's defaults. Keys of the section count wherever they stand in the file, as in the original.

    Raises TypeError and ValueError, as `LoraConfig` does.
    """
    loose = {name: get_attribute_from_cfg(cfg, f"{PEFT}.{name}") for name in ALIGNMENT["peft"].inside or {}}
    given = {**loose, **plain(get_attribute_from_cfg(cfg, PEFT) or {})}
    return LoraConfig(**{**_DEFAULTS, **{_NAMES.get(name, name): plain(value) for name, value in given.items() if value is not None}})
