"""`torch_xla.experimental.xla_sharded_tensor`: an older name of `torch_xla.distributed.spmd`."""

from torch_bridge.torch_xla.distributed.spmd import (
    XLAShardedTensor,
)

__all__ = ["XLAShardedTensor"]
