"""Grouped convolutions and their gradients, as torch computes them on the CPU (by oneDNN, mostly)."""

from __future__ import annotations

from typing import Any

import torch

from torch_bridge.lowerings.torch_kernels.registry import kernel

aten = torch.ops.aten
Tensors = list[torch.Tensor]


@kernel("convolution")
def convolution(arguments: Tensors, results: Tensors, geometry: tuple[Any, ...]) -> None:
    """x, w -> their convolution without a bias. geometry: what `aten.convolution` takes after it."""
    x, w = arguments
    results[0].copy_(aten.convolution(x, w, None, *geometry))


@kernel("convolution_gradients")
def convolution_gradients(arguments: Tensors, results: Tensors, geometry: tuple[Any, ...], wanted: tuple[bool, bool]) -> None:
    """grad, x, w -> those of the gradients of x and w that are wanted."""
    grad, x, w = arguments
    found = aten.convolution_backward(grad, x, w, None, *geometry, [*wanted, False])
    for result, gradient in zip(results, [f for f, want in zip(found, wanted, strict=False) if want], strict=True):
        result.copy_(gradient)
