"""`torch_neuronx.distributed.fsdp_mics`: as `XlaFullyShardedDataParallel`, in a world of one the module itself."""

from __future__ import annotations

from torch_bridge.torch_xla.distributed.fsdp import XlaFullyShardedDataParallel


class XlaFullyShardedDataParallelMiCS(XlaFullyShardedDataParallel):
    """`torch_neuronx.distributed.fsdp_mics.XlaFullyShardedDataParallelMiCS`. Raises NotImplementedError in a world of several ranks."""
