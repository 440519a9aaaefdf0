"""`torch_xla.experimental.gradient_accumulation`: gradients of several small batches in one step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


def gradient_accumulation(
    train_step: Callable[..., Any],
    iterable_tensors: Sequence[torch.Tensor],
    model: torch.nn.Module,
    carried_tensors: tuple[torch.Tensor, ...] | None = None,
) -> tuple[torch.Tensor, ...]:
    """`torch_xla.experimental.gradient_accumulation.gradient_accumulation`: add the gradients of all slices' mean loss to the model's parameters.

    train_step: gets a slice along dimension 0 of each iterable tensor, then the carried tensors; returns the loss, with carried tensors (loss, *carried). The
    carried are the next call's; gradients do not pass through them. Returns (the mean loss, *carried). The loop is recorded slice by slice; equal slices in a
    row may be compiled as one loop (`NXD_JAX_FOLD`). ValueError for iterable tensors that are none, empty or of different lengths.
    """
    steps = _length(iterable_tensors)
    parameters = [p for p in model.parameters() if p.requires_grad]
    carried = tuple(carried_tensors or ())
    total: Any = 0.0
    for k in range(steps):
        result = train_step(*(t[k] for t in iterable_tensors), *carried)
        loss, *rest = result if carried else (result,)
        carried = tuple(t.detach().requires_grad_(t.requires_grad) for t in rest)
        loss = loss / steps
        for p, grad in zip(parameters, torch.autograd.grad(loss, parameters, allow_unused=True), strict=True):
            if grad is not None:
                p.grad = grad if p.grad is None else p.grad + grad
        total = total + loss.detach().float()
    return total, *(t.detach() for t in carried)


def _length(tensors: Sequence[torch.Tensor]) -> int:
    if not tensors:
        raise ValueError("iterable_tensors cannot be empty")
    for k, t in enumerate(tensors):
        if not isinstance(t, torch.Tensor):
            raise ValueError(f"Element {k} of iterable_tensors is not a tensor but {type(t).__name__}")
        if not t.numel() or not t.dim():
            raise ValueError(f"Element {k} of iterable_tensors is empty or has no dimension to iterate over: its shape is {list(t.shape)}")
        if t.shape[0] != tensors[0].shape[0]:
            raise ValueError(f"Element {k} of iterable_tensors has inconsistent first dimension: {t.shape[0]}, not {tensors[0].shape[0]}")
    return tensors[0].shape[0]
