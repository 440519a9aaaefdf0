"""`torch_xla.distributed.zero_redundancy_optimizer`: can be imported, not used."""

from __future__ import annotations

from typing import Any

import torch


class ZeroRedundancyOptimizer(torch.optim.Optimizer):
    """`torch_xla.distributed.zero_redundancy_optimizer.ZeroRedundancyOptimizer`: raises NotImplementedError when constructed."""

    def __init__(self, params: Any, optimizer_class: Any = None, *args: Any, **kwargs: Any):
        name = getattr(optimizer_class, "__name__", "the optimizer")
        raise NotImplementedError(
            f"ZeroRedundancyOptimizer is not in this release: in a world of one worker there is nothing to shard, so use {name} itself. "
            "ZeRO-1 comes with neuronx_distributed's optimizer wrapper."
        )
