"""`torch_xla.experimental.distributed_checkpoint`: checkpoints of annotated models, as files of `torch.distributed.checkpoint`."""

from torch_bridge.torch_xla.experimental.distributed_checkpoint.manager import CheckpointManager
from torch_bridge.torch_xla.experimental.distributed_checkpoint.planners import SPMDLoadPlanner, SPMDSavePlanner
from torch_bridge.torch_xla.experimental.distributed_checkpoint.util import prime_optimizer

__all__ = ["CheckpointManager", "SPMDLoadPlanner", "SPMDSavePlanner", "prime_optimizer"]
