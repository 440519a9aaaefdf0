"""`torch_xla.distributed.fsdp.xla_fully_sharded_data_parallel`."""

from torch_bridge.torch_xla.distributed.fsdp import XlaFullyShardedDataParallel

__all__ = ["XlaFullyShardedDataParallel"]
