"""How many tokens go to each expert of a layer, counted on the device."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from nxd_jax.modules.moe import capacity
from nxd_jax.tensor_parallel import parallel_groups
from torch_bridge.collectives import functional
from torch_bridge.mesh import world
from torch_bridge.recorder import sharded


@dataclasses.dataclass(frozen=True)
class LoadStatistics:
    """How many (token, expert) choices fell on each expert, over all data- and context-parallel ranks, in the time that was asked about.

    tokens: by expert. dropped: choices that found their expert full; they are among `tokens`.
    """

    tokens: tuple[int, ...]
    dropped: int

    @classmethod
    def of_counts(cls, counts: torch.Tensor) -> LoadStatistics:
        """From counts [E + 1] as `ExpertLoad` has them. Waits for the device."""
        *tokens, dropped = counts.tolist()
        return cls(tuple(tokens), dropped)

    @property
    def imbalance(self) -> float:
        """What the busiest expert has, over the mean: 1.0 if all have the same, E if one has all. NaN if nothing was counted."""
        return max(self.tokens) * len(self.tokens) / sum(self.tokens) if sum(self.tokens) else float("nan")

    @property
    def dropped_share(self) -> float:
        """The share of choices that were dropped, 0 to 1. NaN if nothing was counted."""
        return self.dropped / sum(self.tokens) if sum(self.tokens) else float("nan")

    @property
    def idle_experts(self) -> int:
        """Experts that nobody chose."""
        return sum(not n for n in self.tokens)

    def __str__(self) -> str:
        return f"busiest {self.imbalance:.2f}x of the mean, {self.idle_experts} of {len(self.tokens)} idle, {100 * self.dropped_share:.1f} % dropped"


class ExpertLoad(torch.nn.Module):
    """Counts the choices of one MoE layer in training, on the device. Nothing of it is in state dicts.

    counts: int64 [E + 1], of this rank: choices of each expert, then how many of all of them were dropped. They only grow, so that several can read them,
    each of whom remembers what there was before.
    """

    counts: torch.Tensor

    def __init__(self, num_experts: int, device: Any = None):
        super().__init__()
        self.register_buffer("counts", _zeros(num_experts + 1, device), persistent=False)
        self._before: torch.Tensor | None = None

    @torch.no_grad()
    def count(self, index: torch.Tensor, mask: torch.Tensor | None, experts: Any, seq_len: int) -> None:
        """Count a pass. index: [T, k]; mask: [T], 0 for padding, which is not counted. experts: knows whether they have a capacity, and which.

        Evaluation does not count, and neither does an activation checkpoint that computes the pass again.
        """
        if not experts.training or torch._C._current_graph_task_id() >= 0:
            return
        weights = torch.ones_like(index) if mask is None else (mask.reshape(-1, 1) != 0).to(index.dtype).expand_as(index)
        found = torch.zeros_like(self.counts).scatter_add(0, index.reshape(-1), weights.reshape(-1))
        if experts.drops_tokens(seq_len):
            slots = capacity.expert_capacity(index.shape[0], index.shape[1], experts.capacity_factor, experts.num_experts)
            found[-1] = (found - slots).clamp(min=0).sum()
        self.counts += found

    @torch.no_grad()
    def reset(self) -> None:
        """Let `statistics` begin anew."""
        self._before = self.counts + 0  # memory of its own: the next step still updates the counts in place, in the same program

    def statistics(self) -> LoadStatistics:
        """What was counted on all ranks since the last `reset`. Waits for the device; all processes that have the layer call it."""
        new = self.counts if self._before is None else self.counts - self._before.to(self.counts.device)
        return LoadStatistics.of_counts(everywhere(new))


def _zeros(count: int, device: Any) -> torch.Tensor:
    """Of each rank, in memory: the first step finds them as it leaves them, so that its program is that of all steps."""
    zeros = torch.zeros(count, dtype=torch.int64)
    if torch.device("cpu" if device is None else device).type != "xla" or not parallel_groups.initialized():
        return zeros.to(device)
    axes = {axis for kind in ("dp", "cp") if parallel_groups.size(kind) > 1 for axis in sharded.axes_of(parallel_groups.group(kind))}
    return sharded.from_ranks(lambda rank: zeros, [axis for axis in world.current().axes if axis in axes]) if axes else zeros.to(device)


def everywhere(counted: torch.Tensor) -> torch.Tensor:
    """The sum over data- and context-parallel ranks, which have other tokens."""
    for kind in ("dp", "cp"):
        if counted.device.type == "xla" and parallel_groups.initialized() and parallel_groups.size(kind) > 1:
            counted = functional.all_reduce("sum", counted, groups=parallel_groups.group(kind))
    return counted
