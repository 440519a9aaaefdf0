"""`neuronx_distributed.trainer`: one configuration, and a model, an optimizer and checkpoints that follow it."""

from __future__ import annotations

import importlib
from typing import Any

from nxd_jax.trainer.post_partition_hooks import PostPartitionHooks, hooks
from nxd_jax.trainer.trainer import initialize_parallel_model, initialize_parallel_optimizer, neuronx_distributed_config

_CHECKPOINT = ("CheckpointIOState", "finalize_checkpoint", "has_checkpoint", "load_checkpoint", "save_checkpoint")

__all__ = [
    "PostPartitionHooks",
    "hooks",
    "initialize_parallel_model",
    "initialize_parallel_optimizer",
    "neuronx_distributed_config",
]


def __getattr__(name: str) -> Any:
    if name in _CHECKPOINT:  # imported when first used: it takes long
        return getattr(importlib.import_module(f"{__name__}.checkpoint"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_CHECKPOINT])
