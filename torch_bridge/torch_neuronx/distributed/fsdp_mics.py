"""`torch_neuronx.distributed.fsdp_mics`: as `XlaFullyShardedDataParallel`, in a world of one the module itself."""

from __future__ import annotations

from typing import Any

from torch import nn

from torch_bridge.fsdp.wrapper import XlaFullyShardedDataParallel
from torch_bridge.mesh import world


class XlaFullyShardedDataParallelMiCS(XlaFullyShardedDataParallel):
    """`torch_neuronx.distributed.fsdp_mics.XlaFullyShardedDataParallelMiCS`. Raises NotImplementedError in a world of several ranks."""

    def __init__(self, module: nn.Module, *args: Any, **options: Any):
        if world.size() > 1:
            raise NotImplementedError(
                "XlaFullyShardedDataParallelMiCS, which shares parameters out in small groups and adds gradients up across them, is not there yet in a world "
                "of several ranks: use torch_xla.distributed.fsdp.XlaFullyShardedDataParallel, which shares them out among all ranks"
            )
        super().__init__(module, *args, **options)
