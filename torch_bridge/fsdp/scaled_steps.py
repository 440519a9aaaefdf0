"""Gradient scalers for gradients of shards: an inf lies in one rank's part, and all ranks must skip, and keep one scale."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_bridge.fsdp import live
from torch_bridge.optimizers import scaled_steps

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch

    from torch_bridge.mesh.groups import GroupLike


def sharing_out(optimizer: torch.optim.Optimizer) -> Iterable[GroupLike]:
    """The groups that share an optimizer's parameters out."""
    grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    return {among.loose_text: among.members for among in live.of(grads) if among is not None}.values()


def install() -> None:
    """Called when a module is wrapped. Optimizers without shards are as before."""
    scaled_steps.ask(sharing_out)
