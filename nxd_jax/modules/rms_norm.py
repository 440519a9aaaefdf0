"""`neuronx_distributed.modules.rms_norm`."""

from __future__ import annotations

from typing import Any

import torch

from nxd_jax.tensor_parallel.keeps_marks import KeepsMarks


class RMSNorm(KeepsMarks):
    """x / sqrt(mean(x^2) + eps) * weight over the last dims, computed in float32 and returned in x's dtype.

    normalized_shape: an int or the sizes of the last dims. sequence_parallel_enabled is set on the layer and its weight;
    `grads.allreduce_sequence_parallel_gradients` reads it. Further arguments: device, dtype.
    """

    def __init__(self, normalized_shape: Any, eps: float = 1e-5, sequence_parallel_enabled: bool = False, **kwargs: Any):
        super().__init__()
        size = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
        self.normalized_shape = size
        self.eps = eps
        self.sequence_parallel_enabled = sequence_parallel_enabled
        self.weight = torch.nn.Parameter(torch.ones(size, **kwargs))
        self.weight.sequence_parallel_enabled = sequence_parallel_enabled  # type: ignore[attr-defined]

    def reset_parameters(self) -> None:
        """Ones again."""
        torch.nn.init.ones_(self.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., *normalized_shape]."""
        dims = tuple(range(-len(self.normalized_shape), 0))
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(dims, keepdim=True) + self.eps)
        return (normed * self.weight.float()).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.normalized_shape}, eps={self.eps}"
