"""`torch_xla.distributed.fsdp`: parameters shared out among data-parallel ranks (ZeRO-3), see `torch_bridge.fsdp`."""

from __future__ import annotations

from typing import Any

from torch import nn

from torch_bridge.fsdp.consolidation import (
    consolidate_sharded_model_checkpoints,
    consolidate_sharded_optimizer_states,
    consolidate_sharded_state_dicts,
)
from torch_bridge.fsdp.wrapper import XlaFullyShardedDataParallel
from torch_bridge.torch_xla.distributed.fsdp import _operations
from torch_bridge.torch_xla.distributed.fsdp._checkpointed import Checkpointed

_operations.install()


def checkpoint_module(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
    """`fsdp.checkpoint_module`: make a module's forward an activation checkpoint.

    A call in which no tensor among the arguments, by position or by keyword, requires gradients is not checkpointed, as in torch_xla: the parameters would get
    no gradients. The forward as it was is `module._xla_checkpointed_forward_original`.
    """
    module._xla_checkpointed_forward_original = module.forward  # type: ignore[assignment]
    module.forward = Checkpointed(module)
    return module


__all__ = [
    "XlaFullyShardedDataParallel",
    "checkpoint_module",
    "consolidate_sharded_model_checkpoints",
    "consolidate_sharded_optimizer_states",
    "consolidate_sharded_state_dicts",
]
