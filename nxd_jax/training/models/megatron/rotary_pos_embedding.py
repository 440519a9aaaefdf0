"""`neuronx_distributed_training.models.megatron.rotary_pos_embedding`."""

from __future__ import annotations

import types
from typing import Any

import torch

from nxd_jax.training.models.hf_models.rotary import LlamaRotaryEmbedding, rotate

__all__ = ["RotaryEmbedding", "apply_rotary_pos_emb"]


class RotaryEmbedding(LlamaRotaryEmbedding):
    """Cosines and sines of positions 0, 1, ...: forward(x [..., length, dim]) returns both, [length, rotated], float32 on the device.

    dim: size of a head, of which the first `int(dim * rotary_percentage)` values are turned. base * position_abf_factor: of the frequencies.
    position_interpolation_factor: divides positions. max_position_embeddings: accepted without effect, angles are computed for the length that is there.

    Buffer inv_freq: not in state dicts; checkpoints of the original have it, and load with or without.
    """

    def __init__(
        self,
        dim: int,
        max_position_embeddings: int = 4096,
        base: float = 10000,
        device: Any = None,
        position_interpolation_factor: float = 1.0,
        position_abf_factor: float = 1,
        rotary_percentage: float = 1.0,
    ):
        self.position_interpolation_factor = float(position_interpolation_factor or 1.0)
        rotated = int(dim * rotary_percentage) if rotary_percentage < 1 else dim
        super().__init__(types.SimpleNamespace(head_dim=rotated, rope_theta=base * position_abf_factor), device)

    def reset(self, device: Any = None, length: int = 0) -> None:
        super().reset(device, length)
        self.inv_freq = self.inv_freq / self.position_interpolation_factor


def apply_rotary_pos_emb(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and keys [..., length, dim] with their first values turned by the angles of their places, others as they are.

    The halves of what is turned are the two coordinates. (With rotary_percentage below 1 the original mixes halves of the whole head.)
    """
    return _turned(q, cos, sin), _turned(k, cos, sin)


def _turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    size = cos.shape[-1]
    if size == x.shape[-1]:
        return rotate(x, cos, sin)
    return torch.cat((rotate(x[..., :size], cos, sin), x[..., size:]), dim=-1)
