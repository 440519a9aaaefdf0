"""`neuronx_distributed.parallel_layers.layer_norm`."""

from __future__ import annotations

from typing import Any

import torch

from nxd_jax.tensor_parallel.keeps_marks import KeepsMarks


class LayerNorm(KeepsMarks, torch.nn.LayerNorm):
    """`torch.nn.LayerNorm` whose parameters say whether their gradients are summed over sequence parallel ranks.

    sequence_parallel_enabled is set on the layer, its weight and its bias; `grads.allreduce_sequence_parallel_gradients` reads it.
    """

    def __init__(
        self,
        normalized_shape: Any,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        sequence_parallel_enabled: bool = False,
    ):
        super().__init__(normalized_shape, eps=eps, elementwise_affine=elementwise_affine, bias=bias, device=device, dtype=dtype)
        self.sequence_parallel_enabled = sequence_parallel_enabled
        for parameter in self.parameters(recurse=False):
            parameter.sequence_parallel_enabled = sequence_parallel_enabled  # type: ignore[attr-defined]
