"""torch's gradient scalers for gradients of shards: an inf lies in one rank's part, and all ranks must skip, and keep one scale."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler

from torch_bridge.fsdp import live
from torch_bridge.optimizers.scaled_steps import Found, agree


def install() -> None:
    """Called when a module is wrapped. Optimizers without shards are as before."""
    if not hasattr(GradScaler._unscale_grads_, "_knows_shards"):
        GradScaler._unscale_grads_ = _knowing_shards(GradScaler._unscale_grads_)  # type: ignore[method-assign]


def _knowing_shards(unscale: Callable[..., Found]) -> Callable[..., Found]:
    @functools.wraps(unscale)
    def unscale_and_agree(self: GradScaler, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Found:
        found = unscale(self, optimizer, *args, **kwargs)
        grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        return agree(found, {among.loose_text: among.members for among in live.of(grads) if among is not None}.values())

    unscale_and_agree._knows_shards = True  # type: ignore[attr-defined]
    return unscale_and_agree
