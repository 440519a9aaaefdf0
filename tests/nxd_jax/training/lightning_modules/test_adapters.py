"""Adapters from the keys of a YAML file."""

from __future__ import annotations

import pytest
from omegaconf import OmegaConf

from nxd_jax.training.lightning_modules.model import adapters


def test_keys_and_defaults() -> None:
    found = adapters.lora_config(
        {"model_alignment_strategy": {"peft": {"lora_rank": 4, "lora_bias": "all", "use_rslora": True, "lora_alpha": None}}}
    )
    assert (found.lora_rank, found.lora_alpha, found.bias, found.use_rslora, found.target_modules) == (4, 32, "all", True, ["qkv_proj"])


def test_keys_count_wherever_they_stand() -> None:
    """As the original looks for them; in the section itself they come first."""
    cfg = OmegaConf.create({"model": {"lora_rank": 4, "lora_alpha": 8, "target_modules": ["o_proj"]}, "peft": {"lora_alpha": 16}})
    found = adapters.lora_config(cfg)
    assert (found.lora_rank, found.lora_alpha, found.target_modules) == (4, 16, ["o_proj"])
    cfg = OmegaConf.create({"lora_alpha": 8, "model_alignment_strategy": {"peft": {"lora_alpha": 16}}})
    assert adapters.lora_config(cfg).lora_alpha == 16


def test_other_keys() -> None:
    with pytest.raises(TypeError, match="rank"):
        adapters.lora_config({"peft": {"rank": 4}})
