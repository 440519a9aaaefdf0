"""`torch_xla.distributed.fsdp.xla_fully_sharded_data_parallel`."""

from torch_bridge.fsdp.wrapper import XlaFullyShardedDataParallel

__all__ = ["XlaFullyShardedDataParallel"]
