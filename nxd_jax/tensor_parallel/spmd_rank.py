"""The rank as a tensor that a model holds."""

from __future__ import annotations

from typing import Any

import torch

from nxd_jax.tensor_parallel.partition import set_tensor_model_parallel_attributes
from torch_bridge.mesh import world


class SPMDRank(torch.nn.Module):
    """`neuronx_distributed.parallel_layers.layers.SPMDRank`: parameter `rank`, int32 of shape [1], holds each rank's number, 0..world_size-1.

    world_size: the ranks that number themselves; ranks of a larger world are numbered modulo it. tensor_model_parallel_size is accepted.
    A model that runs as one program for all ranks asks it where NxD's asks Python; here `get_tensor_model_parallel_rank()` serves as well.
    """

    def __init__(self, world_size: int, tensor_model_parallel_size: int | None = None):
        super().__init__()
        self.world_size = world_size
        self.tensor_model_parallel_size = tensor_model_parallel_size
        self.rank = torch.nn.Parameter(_numbers(world_size), requires_grad=False)
        set_tensor_model_parallel_attributes(self.rank, True, 0, 1, num_partitions=world_size)

    def forward(self) -> torch.Tensor:
        """The rank, int32 of shape [1]."""
        return self.rank

    get_rank = forward

    def preshard_hook(self, model_state_dict: dict[str, Any], prefix: str) -> None:
        """Put all ranks' numbers into a full state dict, to be shared out with the weights. prefix: `...rank`, or `...weight`, as modules are asked."""
        module, dot, _ = prefix.rpartition(".")
        model_state_dict[f"{module}{dot}rank"] = torch.arange(self.world_size, dtype=torch.int32)


def _numbers(count: int) -> torch.Tensor:
    def number(rank: int) -> torch.Tensor:
        return torch.tensor([rank % count], dtype=torch.int32)

    if len(world.current().hosted) == 1 or count == 1:
        return number(world.first())
    from torch_bridge.recorder import sharded

    return sharded.from_ranks(number, world.axes_of_table([r % count for r in range(world.size())]))
