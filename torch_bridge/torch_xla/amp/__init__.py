"""`torch_xla.amp`."""

from torch_bridge.torch_xla.amp.autocast_mode import autocast
from torch_bridge.torch_xla.amp.grad_scaler import GradScaler

__all__ = ["GradScaler", "autocast"]
