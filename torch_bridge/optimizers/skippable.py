"""Optimizer steps that a tensor calls off without the host asking for its value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


@torch.no_grad()
def stepped_unless(found_inf: torch.Tensor, optimizer: torch.optim.Optimizer, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call `step`, then put back the old value of every parameter and state if `found_inf` is not 0.

    A state that this step created becomes 0 when the step is called off, as it is before a first step.
    """
    device = found_inf.device
    _keep_counts_on(device, optimizer)
    before = [(t, t.clone()) for t in _tensors(optimizer)]
    result = step(*args, **kwargs)
    skip = found_inf != 0
    known = {id(t) for t, _ in before}
    for t, old in before:
        t.copy_(torch.where(skip, old, t))
    for t in _tensors(optimizer):
        if id(t) not in known:
            t.copy_(torch.where(skip.to(t.device), torch.zeros_like(t), t))
    return result


def _tensors(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    params = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    return params + [v for p in params for v in optimizer.state.get(p, {}).values() if isinstance(v, torch.Tensor)]


def _keep_counts_on(device: torch.device, optimizer: torch.optim.Optimizer) -> None:
    """Adam's step counts, normally on the CPU, where a device value could not hold them back."""
    for group in optimizer.param_groups:
        if "capturable" in group:
            group["capturable"] = True
            for p in group["params"]:
                state = optimizer.state.get(p, {})
                if isinstance(state.get("step"), torch.Tensor):
                    state["step"] = state["step"].to(device)
