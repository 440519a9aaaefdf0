"""What all layers of one call read."""

from __future__ import annotations

import dataclasses

import torch

from nxd_jax.inference.kv_cache import KVCacheManager

Rotation = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines, [B, 1, S, head_dim], or [S, head_dim] for prompts."""


@dataclasses.dataclass(frozen=True)
class Step:
    """B rows of S tokens. positions: [B, S] int64, None for prompts, which begin at 0. seq_ids: [B] int64, lines of the cache, by default row i's is i.

    length: slots of the cache to read, None for all. rotation: of queries and keys, None for a model with learned positions. adapter_ids: [B] int64, the
    slots of the rows' LoRA adapters, 0 for none; None for a model without room for adapters.
    """

    cache: KVCacheManager
    positions: torch.Tensor | None = None
    seq_ids: torch.Tensor | None = None
    length: int | None = None
    rotation: Rotation | None = None
    adapter_ids: torch.Tensor | None = None

    def places(self, ids: torch.Tensor) -> torch.Tensor:
        """The positions of ids [B, S]: [B, S], or [S] where all rows have the same."""
        return torch.arange(ids.shape[1], device=ids.device) if self.positions is None else self.positions
