"""`torch_xla.experimental.xla_sharding`: the older name of `torch_xla.distributed.spmd.xla_sharding`."""

from torch_bridge.torch_xla.distributed.spmd.xla_sharding import *  # noqa: F403
from torch_bridge.torch_xla.distributed.spmd.xla_sharding import __all__ as __all__
