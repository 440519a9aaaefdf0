"""Tokens in blocks of one expert each: the maps of NxD's blockwise kernels, and how ranks that hold the same expert share its tokens out.

The experts here need none of it (grouped products find their blocks on their own); scripts and tests that ask for the maps get NxD's.

Legend: T tokens, E experts, k experts of a token, N blocks, B tokens in a block.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F

from nxd_jax.modules.moe.blockwise_kernels import (
    ExpertAffinityScaleMode,
    SkipMode,
    TorchBlockwiseTraining,
    can_use_blockwise_matmul_nki,
    check_blockwise_mm_kernel_compatibility,
)
from nxd_jax.modules.moe.moe_configs import BlockShardStrategy

__all__ = [
    "BlockShardStrategy",
    "ExpertAffinityScaleMode",
    "SkipMode",
    "TorchBlockwiseTraining",
    "allocate_token_blocks",
    "block_count",
    "can_use_blockwise_matmul_nki",
    "check_blockwise_mm_kernel_compatibility",
    "generate_local_expert_mask_with_redundancy",
    "get_block_conditions",
    "get_blockwise_expert_and_token_mapping",
    "get_expert_affinities_masked",
    "get_expert_mask",
]


def block_count(tokens: int, top_k: int, num_experts: int, block_size: int) -> int:
    """Blocks that hold all pairs whatever the routing: E - 1 experts may fill a block with one token each, and no routing needs more blocks than pairs."""
    pairs = tokens * top_k
    return min(math.ceil((pairs - (num_experts - 1)) / block_size) + num_experts - 1, pairs)


def get_expert_mask(expert_index: torch.Tensor, num_experts: int) -> torch.Tensor:
    """[T, k] -> [T, E] float64, 1 for the experts that a token chose."""
    experts = torch.arange(num_experts, device=expert_index.device)
    return (expert_index.unsqueeze(2) == experts).to(torch.float64).sum(1)


def get_expert_affinities_masked(
    expert_affinities: torch.Tensor, expert_mask: torch.Tensor, normalize_top_k_affinities: bool
) -> torch.Tensor:
    """[T, E]: the affinities where the mask is not 0, and 0 elsewhere; normalised, they add up to 1."""
    masked = expert_affinities.masked_fill(expert_mask == 0, 0)
    return F.normalize(masked, p=1.0, dim=1) if normalize_top_k_affinities else masked


def get_blockwise_expert_and_token_mapping(
    total_tokens: int,
    num_blocks: int,
    expert_mask: torch.Tensor,
    expert_index: torch.Tensor | None = None,
    block_size: int = 512,
    device: Any = None,
    enable_spmd_rank: bool = False,
    spmd_rank: Any = None,
    tensor_parallel_group: Any = None,
    optimized_block_to_token_mapping: bool = True,
    parallelize_token_to_block_mapping: bool = False,
    pad_num_blocks_to_even: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Which expert each block is for [N] int64, and which token stands at each place of the blocks [N * B] int64, -1 for places that are left over.

    expert_mask: [T, E], not 0 for the experts that a token chose. Blocks of expert 0 come first, its tokens in their order; blocks that are not needed are the
    last expert's, and empty. pad_num_blocks_to_even: NxD counts those to the last expert as well, with the same result. The other arguments say how Neuron
    shares out the work, and change nothing; the maps are on the mask's device.

    Raises ValueError for a mask that is not [total_tokens, E].
    """
    if expert_mask.dim() != 2 or expert_mask.shape[0] != total_tokens:
        raise ValueError(f"expert_mask must be [total_tokens={total_tokens}, experts], got {list(expert_mask.shape)}")
    chosen = (expert_mask != 0).to(torch.int64)
    blocks = (chosen.sum(0) + block_size - 1) // block_size
    last = torch.cumsum(blocks, 0)
    block = torch.arange(num_blocks, device=expert_mask.device)
    block_to_expert = (block.unsqueeze(1) >= last[:-1]).sum(1)
    places = torch.cumsum(chosen, 0) - 1 + (last - blocks) * block_size
    nowhere = num_blocks * block_size
    places = torch.where(chosen != 0, places.clamp(max=nowhere), nowhere)
    tokens = torch.arange(total_tokens, device=expert_mask.device).unsqueeze(1).expand_as(places)
    empty = torch.full((nowhere + 1,), -1, dtype=torch.int64, device=expert_mask.device)
    return block_to_expert, empty.scatter(0, places.reshape(-1), tokens.reshape(-1))[:nowhere]


def get_block_conditions(block_size: int, num_blocks: int, token_position_to_id: torch.Tensor) -> torch.Tensor:
    """[N] int32: 1 for blocks with tokens."""
    return (token_position_to_id.reshape(num_blocks, block_size) != -1).any(1).to(torch.int32)


def allocate_token_blocks(local_redudancy_degree: torch.Tensor, tokens_per_expert: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The first and the last token, both int32 [ep, E], that each expert parallel rank computes of each expert. (The spelling is NxD's.)

    local_redudancy_degree: [ep, E] integers, how often a rank holds an expert. Every copy of an expert gets the same number of tokens, and the last rank the
    rest; a rank without a copy gets an empty run, which ends before it starts.
    """
    held = torch.cumsum(local_redudancy_degree, 0)
    before, total = held - local_redudancy_degree, held[-1:].clamp(min=1)
    share = tokens_per_expert // total
    end = torch.where(held == held[-1:], tokens_per_expert, held * share) - 1
    return (before * share).to(torch.int32), end.to(torch.int32)


def generate_local_expert_mask_with_redundancy(
    local_expert_mask: torch.Tensor,
    local_expert_indices: torch.Tensor,
    expert_start_ids: torch.Tensor,
    expert_end_ids: torch.Tensor,
    num_experts: Any,
    rank: Any,
) -> torch.Tensor:
    """A rank's mask [T, local experts] with 0 for tokens that other copies of an expert compute.

    local_expert_indices: [1, local experts]; of an expert that the rank holds twice, the first copy computes all. expert_start_ids, expert_end_ids: [ep, E], of
    `allocate_token_blocks`. rank: this rank's place among the expert parallel ranks, a number or a tensor [1]. num_experts is accepted.
    """
    experts = local_expert_indices.reshape(-1)
    first, last = (ids[rank].reshape(-1)[experts] for ids in (expert_start_ids, expert_end_ids))
    token = torch.arange(local_expert_mask.shape[0], device=local_expert_mask.device).unsqueeze(1)
    again = torch.tril(experts.unsqueeze(1) == experts, diagonal=-1).any(1)
    return local_expert_mask.masked_fill((token < first) | (token > last) | again, 0)
