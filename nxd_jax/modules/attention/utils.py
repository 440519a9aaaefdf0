"""`neuronx_distributed.modules.attention.utils`: rotary embeddings as Meta's llama has them, with neighbouring entries of a head as coordinates."""

from __future__ import annotations

import math
from typing import Any

import torch

ROPE_DEFAULTS = {"factor": 8, "low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 8192}
"""Llama 3.1's scaling."""


def precompute_freqs_cis(
    dim: int, end: int, theta: float = 10000.0, use_scaled: bool = False, device: Any = None, **kwargs: float
) -> torch.Tensor:
    """The angles of positions 0 to `end` - 1: [end, dim / 2] float32, entry [p, i] = p / theta ** (2 i / dim). They are real, in spite of the name.

    dim: of one head. use_scaled: make low frequencies slower (`apply_scaling`, which gets the other keyword arguments), for contexts longer than the
    model was trained with.
    """
    freqs = 1.0 / theta ** (torch.arange(0, dim, 2, device=device)[: dim // 2].float() / dim)
    if use_scaled:
        freqs = apply_scaling(freqs, **kwargs)
    return torch.outer(torch.arange(end, dtype=torch.float32, device=freqs.device), freqs)


def apply_scaling(freqs: torch.Tensor, **kwargs: float) -> torch.Tensor:
    """Llama 3.1's rule for frequencies (radians per token): those with wavelengths above `original_max_position_embeddings` / `low_freq_factor` tokens
    are divided by `factor`, those below `original_max_position_embeddings` / `high_freq_factor` stay, and those between are mixed.

    Defaults: `ROPE_DEFAULTS`. Raises TypeError for other names, ValueError unless `high_freq_factor` is above `low_freq_factor`.
    """
    if unknown := set(kwargs) - set(ROPE_DEFAULTS):
        raise TypeError(f"scaling of rotary embeddings has no {', '.join(sorted(unknown))}: it takes {', '.join(ROPE_DEFAULTS)}")
    given = {**ROPE_DEFAULTS, **kwargs}
    low, high = given["low_freq_factor"], given["high_freq_factor"]
    if high <= low:
        raise ValueError(f"high_freq_factor={high} must be above low_freq_factor={low}")
    turns = given["original_max_position_embeddings"] * freqs / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - kept) * freqs / given["factor"] + kept * freqs


def apply_rotary_polar_compatible(query: torch.Tensor, key: torch.Tensor, freqs_cis: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Query and key turned by the angles of their positions, each in its own dtype; computed in float32.

    query, key: [batch, length, heads, head_dim], numbers of heads may differ; entries 2 i and 2 i + 1 of a head are the coordinates that angle i turns.
    freqs_cis: angles float32 of those positions, [length, head_dim / 2], or [1 or batch, length, head_dim / 2].

    Raises ValueError for angles of another dtype, or of heads of another size.
    """
    if freqs_cis.dtype != torch.float32:
        raise ValueError(f"freqs_cis has dtype {freqs_cis.dtype}: angles must be torch.float32, or far positions get wrong ones")
    for name, x in (("query", query), ("key", key)):
        if x.shape[-1] != 2 * freqs_cis.shape[-1]:
            raise ValueError(
                f"{name} has heads of size {x.shape[-1]} and freqs_cis {freqs_cis.shape[-1]} angles for each position: one for every two entries is wanted"
            )
    cos, sin = freqs_cis.cos().unsqueeze(-2), freqs_cis.sin().unsqueeze(-2)
    return _turned(query, cos, sin), _turned(key, cos, sin)


def _turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x[..., ::2].float(), x[..., 1::2].float()
    return torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1).flatten(-2).to(x.dtype)
