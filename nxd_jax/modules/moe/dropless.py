"""No token is dropped: rows are all (token, expert) pairs, sorted by expert, and the experts' products are grouped by where each expert's rows end.

The work is that of the pairs, with whatever routing, in one program. NxD runs every token through every expert in most of these cases
(`forward_all_experts`): the same values at E / k times the work.
"""

from __future__ import annotations

import torch

from nxd_jax.modules.moe.assignment import Assignment, sort_pairs


def assign(keys: torch.Tensor, experts: int, complete: bool = True) -> tuple[Assignment, torch.Tensor]:
    """Rows for pairs, and the experts' cumulative ends [experts] int32 among them.

    keys: [T, k] integers, the expert of each pair: 0..experts-1, or `experts` for pairs that none of these experts computes; they have the last rows, behind
    the last end. complete: there are no such pairs.
    """
    order, place, ends = sort_pairs(keys, experts)
    if complete:
        return Assignment(place, order), ends
    used = torch.arange(order.shape[0], device=order.device) < ends[-1]
    return Assignment(place, order, keys < experts, used), ends
