"""Helpers around checkpoints of annotated models."""

from __future__ import annotations

import torch

__all__ = ["prime_optimizer"]


def prime_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """`prime_optimizer`: have an optimizer make its state, so that a checkpoint can be read into it: a step with gradients of 0 and a learning rate of 0.

    Parameters keep their values. Step counters count that step; loading replaces them. Gradients are gone afterwards. Raises RuntimeError if there are some
    already, as the step would take them for its own. Returns the optimizer.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    if any(p.grad is not None for p in parameters):
        raise RuntimeError(
            "prime_optimizer: parameters have gradients already; call it before the first backward pass, or optimizer.zero_grad() first"
        )
    rates = [group.get("lr") for group in optimizer.param_groups]
    try:
        for group in optimizer.param_groups:
            group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group.get("lr"), torch.Tensor) else 0.0
        for p in parameters:
            p.grad = torch.zeros_like(p)
        optimizer.step()
    finally:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        for p in parameters:
            p.grad = None
    return optimizer
