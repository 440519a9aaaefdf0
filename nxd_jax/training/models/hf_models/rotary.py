"""Rotary position embeddings: every kind that transformers' configurations name."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from nxd_jax.tensor_parallel import parallel_groups
from nxd_jax.tensor_parallel.casting import wide_dtype

BY_LENGTH = ("dynamic", "longrope")
"""Kinds whose frequencies depend on the length of the sequence."""


class LlamaRotaryEmbedding(nn.Module):
    """Cosines and sines of the places that this rank holds: with context parallelism rank r has the r-th run of each sequence.

    config: `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` (4) say which kind: default, linear, dynamic, yarn, longrope, llama3.

    forward(x [..., length, head_dim], position_ids [batch, length] or None) returns cos and sin [length, head_dim] (with position_ids
    [batch, 1, length, head_dim]), float32 on the device. Raises ValueError for a kind that transformers does not have.
    """

    inv_freq: torch.Tensor

    def __init__(self, config: Any, device: Any = None):
        super().__init__()
        self.config = config
        self.kind = kind_of(config)
        self.attention_scaling = 1.0
        self._length = 0
        self.register_buffer("inv_freq", None, persistent=False)
        self.reset(device)

    def reset(self, device: Any = None, length: int = 0) -> None:
        """Compute the frequencies anew. length: of the whole sequence, for kinds that depend on it."""
        found, self.attention_scaling = frequencies(self.config, length or None)
        self._length = length
        self.register_buffer(
            "inv_freq", found.double().to(device or "cpu"), persistent=False
        )  # float64: stays float32 where XLA_DOWNCAST_BF16=1

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        length = x.shape[-2]
        self._fit(length * parallel_groups.size("cp"), x.device)
        places = torch.arange(length, device=x.device) + parallel_groups.rank("cp") * length if position_ids is None else position_ids
        angles = places.to(wide_dtype()).unsqueeze(-1) * self.inv_freq.to(wide_dtype())
        angles = torch.cat((angles, angles), dim=-1)
        if position_ids is not None and position_ids.dim() > 1:
            angles = angles.unsqueeze(1)
        return angles.cos() * self.attention_scaling, angles.sin() * self.attention_scaling

    def _fit(self, whole: int, device: torch.device) -> None:
        """The frequencies of sequences of this length, in the dtype that they were made in (`model.bfloat16()` changes it)."""
        by_length = self.kind in BY_LENGTH and whole != self._length
        if by_length or self.inv_freq.dtype != torch.float64:
            self.reset(device, whole if self.kind in BY_LENGTH else 0)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Heads [batch, heads, length, head_dim] turned by the angles of their places; halves of head_dim are the two coordinates."""
    low, high = x.to(cos.dtype).chunk(2, dim=-1)
    turned = torch.cat((low, high), dim=-1) * cos + torch.cat((-high, low), dim=-1) * sin
    return turned.to(x.dtype)


def frequencies(config: Any, length: int | None = None) -> tuple[torch.Tensor, float]:
    """(inverse frequencies [head_dim / 2] float32 on the CPU, what cosines and sines are multiplied by)."""
    kind = kind_of(config)
    with torch.device("cpu"):
        if kind == "default":
            size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
            return 1.0 / theta_of(config) ** (torch.arange(0, size, 2, dtype=torch.float) / size), 1.0
        found, scaling = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), seq_len=length)
        return found, float(scaling)


def kind_of(config: Any) -> str:
    """Which kind of rotary embedding a configuration asks for."""
    said = _parameters(config)
    kind = said.get("rope_type") or said.get("type") or "default"
    if kind != "default" and kind not in ROPE_INIT_FUNCTIONS:
        raise ValueError(
            f"rope_scaling of the model's config.json: rope_type {kind!r} must be one of default, {', '.join(ROPE_INIT_FUNCTIONS)}"
        )
    return str(kind)


def theta_of(config: Any) -> float:
    """The base of the frequencies."""
    for said in (_parameters(config).get("rope_theta"), getattr(config, "rope_theta", None), getattr(config, "default_theta", None)):
        if said is not None:
            return float(said)
    return 10000.0


def set_theta(config: Any, theta: float) -> None:
    """Give a configuration another base."""
    if getattr(config, "rope_parameters", None) is not None:
        config.rope_parameters = {**config.rope_parameters, "rope_theta": theta}
    else:
        config.rope_theta = theta


def _parameters(config: Any) -> dict[str, Any]:
    return getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
