"""`torch_xla.distributed.zero_redundancy_optimizer`: ZeRO-1."""

from torch_bridge.optimizers.zero1 import ZeroRedundancyOptimizer

__all__ = ["ZeroRedundancyOptimizer"]
