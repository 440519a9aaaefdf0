"""What this release can train."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig

from nxd_jax.training import registry


def is_custom(cfg: Mapping[str, Any] | DictConfig) -> bool:
    """Whether classes of the user's are named, for the data or the model: they may read any keys."""
    sections = [cfg.get(name) for name in ("data", "model")]
    targets = any(s.get("_target_") for s in sections if isinstance(s, (Mapping, DictConfig)))
    return bool(cfg.get("data_module") or cfg.get("model_module") or targets or registry.is_registered(cfg.get("model_source")))


def why_not(cfg: Mapping[str, Any] | DictConfig) -> str | None:
    """Why a configuration is not trained by this release; None if it is. cfg: a DictConfig, or plain dicts."""
    return None if is_custom(cfg) else registry.why_not(cfg)


def trainable(cfg: DictConfig) -> bool:
    """Whether this release trains a configuration."""
    return why_not(cfg) is None
