"""Full tensors from the parts that tensor parallel ranks hold, and comparisons on every rank."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch

import torch_bridge
from nxd_jax.parallel_layers import parallel_state
from torch_bridge.recorder import sharded
from torch_bridge.runtime import executor, session

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


def close(actual: torch.Tensor, expected: torch.Tensor, rtol: float = 1e-4, atol: float = 1e-5) -> None:
    """Every rank has the expected value."""
    for shard in sharded.shards(actual):
        torch.testing.assert_close(shard, expected, rtol=rtol, atol=atol)


def per_rank(t: torch.Tensor) -> list[torch.Tensor]:
    """Each rank's own value."""
    return sharded.shards(t.detach())


def tp_groups() -> list[list[int]]:
    return parallel_state.get_tensor_model_parallel_group(as_list=True)


def joined(t: torch.Tensor, dim: int, stride: int = 1, order: Sequence[int] | None = None) -> torch.Tensor:
    """The full tensor whose parts the ranks of each tensor parallel group hold (the groups must agree)."""
    shards = per_rank(t)
    found = []
    for group in tp_groups():
        parts = [shards[r] for r in group]
        if order is not None:
            parts = [parts[list(order).index(k)] for k in range(len(parts))]
        blocks = [p.chunk(stride, dim) for p in parts]
        found.append(torch.cat([b[s] for s in range(stride) for b in blocks], dim))
    assert all(torch.equal(f, found[0]) for f in found)
    return found[0]


def tp_place(rank: int) -> int:
    return next(g.index(rank) for g in tp_groups() if rank in g)


def own(values: Sequence[torch.Tensor], axes: Sequence[str] | None = None) -> torch.Tensor:
    """An xla tensor with a value for each rank."""
    return sharded.from_ranks(lambda r: values[r], axes)


def collectives_run() -> dict[str, int]:
    """Run what is recorded; the collectives of its program."""
    session.current().recent.clear()
    executor.sync()
    text = torch_bridge.hlo()
    return {name: n for name in COLLECTIVES if (n := len(re.findall(rf"stablehlo\.{name}\b", text)))}
