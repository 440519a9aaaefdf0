"""`torch_xla.distributed.spmd.xla_sharded_tensor`."""

from torch_bridge.torch_xla.distributed.spmd import (
    XLAShardedTensor,
)

__all__ = ["XLAShardedTensor"]
