"""Clipping gradients of which each rank has a part."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from torch_bridge.collectives import functional
from torch_bridge.fsdp.state import is_shard
from torch_bridge.optimizers import grad_norm as clipping

if TYPE_CHECKING:
    from torch_bridge.mesh.groups import GroupLike


@torch.no_grad()
def clip(params: Sequence[torch.Tensor], max_norm: float, norm_type: float, groups: GroupLike) -> torch.Tensor:
    """Scale gradients, in place, to a total norm of at most `max_norm`; the norm before, without dims, in float32.

    Sums of powers of shards are added up over the ranks of `groups` (None: of all ranks); those of other parameters, which all ranks have whole, are not.
    """
    p = float(norm_type)
    cut = [t.grad for t in params if t.grad is not None and is_shard(t)]
    whole = [t.grad for t in params if t.grad is not None and not is_shard(t)]
    parts = [_all(g, p) for g in (cut, whole) if g]
    if not parts:
        return torch.zeros((), device="xla")
    if cut:
        parts[0] = functional.all_reduce("max" if p == math.inf else "sum", parts[0], groups=groups)
    total = torch.stack(parts).max() if p == math.inf else torch.stack(parts).sum() ** (1.0 / p)
    clipping.scale([*cut, *whole], (float(max_norm) / (total + 1e-6)).clamp(max=1.0))
    return total


def _all(grads: Sequence[torch.Tensor], p: float) -> torch.Tensor:
    parts = torch.stack(clipping.sum_powers(list(grads), p, torch.float32))
    return parts.max() if p == math.inf else parts.sum()
