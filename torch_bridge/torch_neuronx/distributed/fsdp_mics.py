"""`torch_neuronx.distributed.fsdp_mics`: can be imported, not used."""

from __future__ import annotations

from typing import Any

from torch_bridge.torch_xla.distributed.fsdp import XlaFullyShardedDataParallel


class XlaFullyShardedDataParallelMiCS(XlaFullyShardedDataParallel):
    """`torch_neuronx.distributed.fsdp_mics.XlaFullyShardedDataParallelMiCS`: raises NotImplementedError when constructed."""

    def __init__(self, *args: Any, **kwargs: Any):
        raise NotImplementedError(
            "XlaFullyShardedDataParallelMiCS is not in this release; in a world of one worker there is nothing to shard"
        )
