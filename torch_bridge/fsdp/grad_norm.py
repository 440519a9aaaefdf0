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
    cut = [t.grad for t in params if t.grad is not None and is_shard(t)]
    whole = [t.grad for t in params if t.grad is not None and not is_shard(t)]
    if not cut and not whole:
        return torch.zeros((), device="xla")
    norm = total([(cut, groups)], whole, float(norm_type))
    clipping.scale([*cut, *whole], (float(max_norm) / (norm + 1e-6)).clamp(max=1.0))
    return norm


def total(cut: Sequence[tuple[Sequence[torch.Tensor], GroupLike]], whole: Sequence[torch.Tensor], p: float) -> torch.Tensor:
    """The p-norm of gradients as one vector, without dims, in float32. cut: parts of them, with the ranks that have the other parts; whole: those that every
    rank has. Raises ValueError for norms other than p > 0 and inf."""
    if not p > 0:
        raise ValueError(f"norm_type={p}: the norm of gradients that are shared out among ranks is one with p > 0, or inf")
    kind = "max" if p == math.inf else "sum"
    parts = [functional.all_reduce(kind, _all(grads, p), groups=groups) for grads, groups in cut if grads]
    if whole:
        parts.append(_all(whole, p))
    return torch.stack(parts).max() if p == math.inf else torch.stack(parts).sum() ** (1.0 / p)


def _all(grads: Sequence[torch.Tensor], p: float) -> torch.Tensor:
    parts = torch.stack(clipping.sum_powers(list(grads), p, torch.float32))
    return parts.max() if p == math.inf else parts.sum()
