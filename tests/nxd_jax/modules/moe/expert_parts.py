"""Weights of all experts from the parts that ranks hold, and back; loops over experts in eager torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from nxd_jax.tensor_parallel import parallel_groups
from tests.nxd_jax.parallel_layers.parts import own, per_rank
from torch_bridge.mesh import world

LAYOUTS = [(tp, ep) for tp in (1, 2, 4) for ep in (1, 2, 4) if tp * ep <= 8]
"""Of 8 ranks; the others are copies."""


def held_by(ep_rank: int, experts: int, distribution: Sequence[Sequence[int]] | None = None) -> list[int]:
    """The experts of an expert parallel rank."""
    count = experts // parallel_groups.size("ep")
    return list(range(ep_rank * count, (ep_rank + 1) * count)) if distribution is None else list(distribution[ep_rank])


def whole(t: torch.Tensor, dim: int | None, stride: int = 1, distribution: Sequence[Sequence[int]] | None = None) -> torch.Tensor:
    """The tensor of all experts, cut along `dim` over tensor parallel ranks (None: not cut). Ranks that hold the same part must agree."""
    tp, ep = (parallel_groups.places(kind) for kind in ("tp", "ep"))
    parts: dict[tuple[int, int], torch.Tensor] = {}
    for rank, shard in enumerate(per_rank(t)):
        assert torch.equal(parts.setdefault((ep[rank], tp[rank]), shard), shard), f"rank {rank} has another value"
    experts = t.shape[0] * parallel_groups.size("ep")
    found = t.new_empty(0, device="cpu")
    rows: dict[int, torch.Tensor] = {}
    for e in range(parallel_groups.size("ep")):
        mine = [parts[e, k] for k in range(parallel_groups.size("tp"))]
        if dim is None:
            assert all(torch.equal(m, mine[0]) for m in mine)
            found = mine[0]
        else:
            blocks = [m.chunk(stride, dim) for m in mine]
            found = torch.cat([b[s] for s in range(stride) for b in blocks], dim)
        rows.update(zip(held_by(e, experts, distribution), found, strict=True))
    return torch.stack([rows[e] for e in range(experts)])


def by_expert_rank(of: Callable[[int], torch.Tensor]) -> torch.Tensor:
    """An xla tensor that is `of(ep_rank)` on each rank."""
    places = parallel_groups.places("ep")
    values = [of(e) for e in range(parallel_groups.size("ep"))]
    return own([values[places[r]] for r in range(world.size())], ["ep"] if len(values) > 1 else [])


def of_expert_ranks(t: torch.Tensor) -> list[torch.Tensor]:
    """The value of each expert parallel rank; its copies must agree."""
    places = parallel_groups.places("ep")
    found: dict[int, torch.Tensor] = {}
    for rank, value in enumerate(per_rank(t)):
        assert torch.equal(found.setdefault(places[rank], value), value), f"rank {rank} has another value"
    return [found[e] for e in range(len(found))]
