"""`torch_xla.distributed.spmd.api`: what `torch.distributed.tensor` calls for a mesh of xla devices."""

from torch_bridge.torch_xla.distributed.spmd import (
    xla_distribute_module,
    xla_distribute_tensor,
)

__all__ = ["xla_distribute_module", "xla_distribute_tensor"]
