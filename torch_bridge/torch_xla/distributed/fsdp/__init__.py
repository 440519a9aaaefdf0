"""`torch_xla.distributed.fsdp`: parameters shared out among data-parallel ranks (ZeRO-3), see `torch_bridge.fsdp`."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from torch_bridge.fsdp.consolidation import consolidate_sharded_model_checkpoints, consolidate_sharded_state_dicts
from torch_bridge.fsdp.wrapper import XlaFullyShardedDataParallel


def checkpoint_module(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
    """`fsdp.checkpoint_module`: make a module's forward an activation checkpoint.

    A call in which no tensor among the arguments, by position or by keyword, requires gradients is not checkpointed, as in torch_xla: the parameters would get
    no gradients. The forward as it was is `module._xla_checkpointed_forward_original`.
    """
    from torch_bridge.torch_xla.utils.checkpoint import checkpoint

    module._xla_checkpointed_forward_original = module.forward  # type: ignore[assignment]

    def checkpointed(*inputs: Any, **named: Any) -> Any:
        forward: Any = module._xla_checkpointed_forward_original
        given = (*inputs, *named.values())
        if not any(isinstance(x, torch.Tensor) and x.requires_grad for x in given):
            return forward(*inputs, **named)
        n = len(inputs)
        return checkpoint(lambda *xs: forward(*xs[:n], **dict(zip(named, xs[n:], strict=True))), *given)

    module.forward = checkpointed
    return module


__all__ = ["XlaFullyShardedDataParallel", "checkpoint_module", "consolidate_sharded_model_checkpoints", "consolidate_sharded_state_dicts"]
