"""The rank as a tensor that a model holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from nxd_jax.tensor_parallel import layer_groups, parallel_groups
from nxd_jax.tensor_parallel.partition import set_tensor_model_parallel_attributes
from torch_bridge.mesh import world

_DERIVED = ("local_expert_indices", "ep_rank")
"""Keys of NxD's checkpoints that hold what follows from the rank and the groups. They are read over."""


class SPMDRank(torch.nn.Module):
    """`neuronx_distributed.parallel_layers.layers.SPMDRank`: parameter `rank`, int32 of shape [1], holds each rank's number, 0..world_size-1.

    world_size: the ranks that number themselves; ranks of a larger world are numbered modulo it. tensor_model_parallel_size is accepted.
    A model that runs as one program for all ranks asks it where NxD's asks Python; here `get_tensor_model_parallel_rank()` serves as well.
    """

    def __init__(self, world_size: int, tensor_model_parallel_size: int | None = None):
        super().__init__()
        self.world_size = world_size
        self.tensor_model_parallel_size = tensor_model_parallel_size
        self._experts: list[list[int]] | None = None
        self.rank = torch.nn.Parameter(_numbers(world_size), requires_grad=False)
        set_tensor_model_parallel_attributes(self.rank, True, 0, 1, num_partitions=world_size)

    def forward(self) -> torch.Tensor:
        """The rank, int32 of shape [1]."""
        return self.rank

    get_rank = forward

    def initialize_expert_indices(
        self, num_local_experts: int, expert_model_parallel_group: Any = None, expert_distribution: Sequence[Sequence[int]] | None = None
    ) -> None:
        """Say how many experts a rank has, so that `get_local_expert_indices` can say which: equal runs, or those of expert_distribution.

        expert_model_parallel_group: the ranks that share experts out; default the expert-parallel group.
        """
        group = parallel_groups.group("ep") if expert_model_parallel_group is None else expert_model_parallel_group
        places = [layer_groups.place_of(group, rank) for rank in range(self.world_size)]
        runs = [range(place * num_local_experts, (place + 1) * num_local_experts) for place in places]
        self._experts = [list(run) for run in runs] if expert_distribution is None else [list(expert_distribution[p]) for p in places]

    def get_local_expert_indices(self) -> torch.Tensor:
        """The experts that the rank has, int32 of shape [1, num_local_experts]. Raises RuntimeError before `initialize_expert_indices`."""
        if self._experts is None:
            raise RuntimeError("SPMDRank knows nothing of experts yet: call initialize_expert_indices(num_local_experts) first")
        return torch.tensor(self._experts, dtype=torch.int32, device=self.rank.device).index_select(0, self.rank.long())

    local_expert_indices = property(get_local_expert_indices)

    def preshard_hook(self, model_state_dict: dict[str, Any], prefix: str) -> None:
        """Put all ranks' numbers into a full state dict, to be shared out with the weights. prefix: `...rank`, or `...weight`, as modules are asked."""
        module, dot, _ = prefix.rpartition(".")
        for name in _DERIVED:
            model_state_dict.pop(f"{module}{dot}{name}", None)
        model_state_dict[f"{module}{dot}rank"] = torch.arange(self.world_size, dtype=torch.int32, device="cpu")

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        known = {key: value for key, value in state_dict.items() if key not in {prefix + name for name in _DERIVED}}
        super()._load_from_state_dict(known, prefix, *rest)


def _numbers(count: int) -> torch.Tensor:
    def number(rank: int) -> torch.Tensor:
        return torch.tensor([rank % count], dtype=torch.int32, device="cpu")

    if len(world.current().hosted) == 1 or count == 1:
        return number(world.first())
    from torch_bridge.recorder import sharded

    return sharded.from_ranks(number, world.axes_of_table([r % count for r in range(world.size())]))
