"""Grouped convolutions and their gradients, as torch computes them on the CPU (by oneDNN, mostly).

| ms, forward and backward, two threads of an AMD EPYC | as torch has it | with the channels last |
|---|---|---|
| 8 x 32 x 16 x 16, 7 x 7, depthwise | 0.2 and 2.4 | 0.1 and 1.0 |
| 16 x 128 x 32 x 32, 3 x 3, depthwise | 11.6 and 19.1 | 2.7 and 5.5 |
| 16 x 64 x 32 x 32, 3 x 3, 32 groups | 7.5 and 18.3 | 5.3 and 8.3 |
| 16 x 128 x 16 x 16, 3 x 3, 2 groups | 6.6 and 12.8 | 5.9 and 11.8 |

Each time with the copy into XLA's buffer.
"""

from __future__ import annotations

from typing import Any

import torch

from torch_bridge.lowerings.torch_kernels.registry import Flags, kernel

aten = torch.ops.aten
Tensors = list[torch.Tensor]


def _images(geometry: tuple[Any, ...]) -> Flags:
    return (True, False), (True,)


def _images_of_gradients(geometry: tuple[Any, ...], wanted: tuple[bool, bool]) -> Flags:
    return (True, True, False), tuple(image for image, want in zip((True, False), wanted, strict=True) if want)


@kernel("convolution", _images)
def convolution(arguments: Tensors, results: Tensors, geometry: tuple[Any, ...]) -> None:
    """x, w -> their convolution without a bias. geometry: what `aten.convolution` takes after it."""
    x, w = arguments
    results[0].copy_(aten.convolution(x, w, None, *geometry))


@kernel("convolution_gradients", _images_of_gradients)
def convolution_gradients(arguments: Tensors, results: Tensors, geometry: tuple[Any, ...], wanted: tuple[bool, bool]) -> None:
    """grad, x, w -> those of the gradients of x and w that are wanted."""
    grad, x, w = arguments
    found = aten.convolution_backward(grad, x, w, None, *geometry, [*wanted, False])
    for result, gradient in zip(results, [f for f, want in zip(found, wanted, strict=False) if want], strict=True):
        result.copy_(gradient)
