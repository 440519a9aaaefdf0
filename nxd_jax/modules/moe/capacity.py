"""Experts with a fixed number of slots: later tokens of an expert that is full are dropped.

The arithmetic is NxD's: an expert has C = min(T, ceil(T k factor / E)) slots; the position of a token in an expert is 1 + the number of earlier tokens
that chose it, whichever of their k choices it was; a token at a position above C is dropped by this expert. Positions are found by sorting (token, expert)
pairs: no [T, E, C] mask, and integers all along, so they are exact for any number of tokens.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from nxd_jax.modules.moe.assignment import Assignment, sort_pairs


def expert_capacity(tokens: int, top_k: int, capacity_factor: float, num_experts: int) -> int:
    """The slots of each expert. Raises ValueError for a factor that is not positive."""
    if capacity_factor <= 0:
        raise ValueError(
            f"capacity_factor must be positive for experts with a capacity, got {capacity_factor}; without dropping, no capacity is needed"
        )
    return min(tokens, math.ceil(tokens * top_k * capacity_factor / num_experts))


def positions(keys: torch.Tensor, experts: int) -> torch.Tensor:
    """Each pair's position in its expert, counted from 1: [T, k] int64. keys: as of `assign`."""
    _, place, ends = sort_pairs(keys, experts)
    return _behind(place, keys, ends) + 1


def assign(keys: torch.Tensor, experts: int, capacity: int) -> Assignment:
    """Slots for pairs, expert after expert: row e * capacity + c is slot c of expert e.

    keys: [T, k] integers, the expert of each pair: 0..experts-1, or `experts` for pairs that take no slot (padding).
    """
    order, place, ends = sort_pairs(keys, experts)
    position = _behind(place, keys, ends)
    kept = (position < capacity) & (keys < experts)
    row = torch.where(kept, keys * capacity + position, 0)
    slots = _starts(ends).unsqueeze(1) + torch.arange(capacity, device=keys.device)
    used = slots < ends.unsqueeze(1)
    pair = torch.where(used, order[slots.clamp(max=order.shape[0] - 1)], 0)
    return Assignment(row, pair.reshape(-1), kept, used.reshape(-1))


def slots(assigned: Assignment, capacity: int) -> torch.Tensor:
    """The token in each expert's slots, [E, capacity] int64; 0 in slots that nobody uses (NxD's token_assignments)."""
    return (assigned.pair // assigned.row.shape[1]).reshape(-1, capacity)


def pair_weights(
    affinities: torch.Tensor, expert_index: torch.Tensor, kept: torch.Tensor | None = None, normalize: bool = False
) -> torch.Tensor:
    """The weight of each pair, [T, k]: the token's affinity for the expert, 0 where it is dropped.

    affinities: [T, E]. kept: [T, k] bool (None: all). normalize: divide by the sum of a token's absolute weights, after dropping: a token that lost one of
    two experts gives the other the weight 1, one that lost both is 0.
    """
    chosen = affinities.gather(1, expert_index)
    if kept is not None:
        chosen = chosen.masked_fill(~kept, 0)
    return F.normalize(chosen, p=1.0, dim=1) if normalize else chosen


def _starts(ends: torch.Tensor) -> torch.Tensor:
    return torch.cat([torch.zeros_like(ends[:1]), ends[:-1]])


def _behind(place: torch.Tensor, keys: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """How many pairs of the same expert stand before each pair."""
    first = torch.cat([torch.zeros_like(ends[:1]), ends]).to(torch.int64)
    return place - first[keys]
