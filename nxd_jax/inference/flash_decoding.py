"""Flash decoding: ranks that would hold copies of a K/V head's cache have a part of its slots each, and attend together.

Member r of a group of n ranks has the tokens at positions r, r + n, r + 2 n, ...; a group's queries meet all parts, and one softmax is put together of them.

Legend: B rows, S tokens, L slots of a rank, H query heads of a rank, D size of a head, n ranks that share a K/V head.
"""

from __future__ import annotations

from typing import Any

import torch

from nxd_jax.inference.kv_cache import KVCacheManager
from nxd_jax.tensor_parallel import kv_groups, layer_groups, regions
from nxd_jax.tensor_parallel.head_plans import GQA, HeadPlan
from torch_bridge.collectives import functional


def group_size(plan: HeadPlan, tp: int, kv_heads: int) -> int:
    """The ranks that share a K/V head, as NxD's num_cores_per_group. Raises ValueError where K/V heads have no copies."""
    if plan.strategy is not GQA.REPLICATE_TO_TP_DEGREE or tp == kv_heads:
        raise ValueError(
            f"flash_decoding_enabled shares out the cache of a K/V head to ranks that would hold copies of it, and {kv_heads} K/V heads on {tp} ranks "
            f"have none{' (gqa)' if plan.strategy is GQA.CONVERT_TO_MHA else ''}: leave it out, or set tp_degree to a multiple of {kv_heads} above it"
        )
    return tp // kv_heads


class SplitKVCacheManager(KVCacheManager):
    """`KVCacheManager` of which each of `ranks` neighbouring ranks has ceil(length / ranks) slots, and one behind them for what is not its own.

    The other arguments, and what is raised, are those of `KVCacheManager`; length: of all ranks together. Positions are those of whole sequences.
    """

    def __init__(self, layers: int, lines: int, kv_heads: int, length: int, head_dim: int, *, ranks: int, **more: Any):
        self.ranks = ranks
        kv_groups.initialize(ranks, sequential=True)
        super().__init__(layers, lines, kv_heads, self._slots(length) + 1, head_dim, **more)
        self.waste = self._slots(length)

    def fill(self, layer: int, k: torch.Tensor, v: torch.Tensor, seq_ids: torch.Tensor | None = None) -> None:
        """As in `KVCacheManager`; k and v are of all tokens."""
        own = self.places(self._slots(k.shape[2]), k.device).clamp(max=k.shape[2] - 1)  # behind the last token: nobody reads it
        super().fill(layer, k.index_select(2, own), v.index_select(2, own), seq_ids)

    def append(self, layer: int, k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor, seq_ids: torch.Tensor | None = None) -> None:
        """As in `KVCacheManager`."""
        mine = positions % self.ranks == self._rank()
        slots = torch.where(mine, positions // self.ranks, self.waste)
        super().append(layer, k, v, slots, seq_ids)

    def get_cache(self, layer: int, length: int | None = None, seq_ids: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """This rank's part of the first `length` slots: [rows, kv_heads, ceil(length / ranks), head_dim]."""
        return super().get_cache(layer, self.waste if length is None else self._slots(length), seq_ids)

    def places(self, count: int, device: Any) -> torch.Tensor:
        """The positions of this rank's first slots."""
        return torch.arange(count, device=device) * self.ranks + self._rank()

    def _slots(self, length: int) -> int:
        return -(-length // self.ranks)

    def _rank(self) -> Any:
        return layer_groups.rank(kv_groups.group())


def attend_together(q_BHSD: torch.Tensor, k_B1LD: torch.Tensor, v_B1LD: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """softmax(q k^T / sqrt(D)) v, [B, H, S, D], of a K/V head whose slots the group's ranks have parts of; exponentials and sums in float32.

    seen: bool [B, S, L], which of this rank's slots each token attends to; some rank must have one.
    """
    group, S, D = kv_groups.group(), q_BHSD.shape[2], q_BHSD.shape[3]
    every = regions.gather(q_BHSD, 1, group)
    scores = torch.matmul(every.flatten(1, 2).unsqueeze(1), k_B1LD.transpose(2, 3)).float() * D**-0.5
    scores = scores.squeeze(1).unflatten(1, (-1, S)).masked_fill(~seen[:, None], -torch.inf)  # [B, n H, S, L]
    largest: torch.Tensor = functional.all_reduce("max", scores.amax(-1, keepdim=True), groups=group)
    weights = (scores - largest).exp()
    found = torch.matmul(weights.to(v_B1LD.dtype), v_B1LD).float()
    parts = torch.cat([found, weights.sum(-1, keepdim=True)], dim=-1)
    whole = regions.reduce_scatter_to_sequence_parallel_region(parts, 1, group)
    return (whole[..., :D] / whole[..., D:]).to(q_BHSD.dtype)
