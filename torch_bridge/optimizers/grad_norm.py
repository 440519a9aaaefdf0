"""What clipping does to all gradients of a model: the sums of powers for their norm, and scaling them, each as one op however many there are."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from torch_bridge.runtime import backend


def sum_powers(tensors: Sequence[torch.Tensor], p: float, dtype: torch.dtype | None = None) -> list[torch.Tensor]:
    """For each tensor the sum of |x|^p of its entries, converted to `dtype` first (None: as it is); their maximum for p = inf (0 if there are none)."""
    if any(t.device.type == "xla" for t in tensors):
        backend.ensure()
        from torch_bridge.optimizers import grad_norm_ops

        return grad_norm_ops.ops.sum_powers(list(tensors), p, dtype)
    return [sum_of(t if dtype is None else t.to(dtype), p) for t in tensors]


def sum_of(t: torch.Tensor, p: float) -> torch.Tensor:
    """The sum of |x|^p of a tensor's entries, or their maximum."""
    if p == math.inf:
        return t.abs().amax() if t.numel() else t.new_zeros(())
    if p == 2:
        return (t * t).sum()
    return t.abs().sum() if p == 1 else (t.abs() ** p).sum()


def scale(tensors: Sequence[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiply all of them, if there are any, in place by a number on their device."""
    if tensors:
        torch._foreach_mul_(list(tensors), factor)
