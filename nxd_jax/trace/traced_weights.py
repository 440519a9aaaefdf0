"""The weights of a module, for each rank of the world, as its traced programs take them."""

from __future__ import annotations

import torch

from torch_bridge.mesh import world
from torch_bridge.recorder import sharded


def of_ranks(module: torch.nn.Module) -> list[dict[str, torch.Tensor]]:
    """What each rank that this process hosts has, CPU tensors; what all ranks share is one tensor. Raises RuntimeError for weights on "meta"."""
    hosted = world.current().hosted
    found: list[dict[str, torch.Tensor]] = [{} for _ in hosted]
    for name, t in [*module.named_parameters(), *module.named_buffers()]:
        if t.device.type == "meta":
            raise RuntimeError(f"{name} is on meta: give the model its weights, or a checkpoint loader")
        value = t.detach()
        several = sharded.of_each(value) or [value] * len(hosted)
        for state, own in zip(found, several, strict=True):
            state[name] = own
    return found
