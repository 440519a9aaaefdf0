"""`torch_xla.amp.syncfree`: optimizers whose step can be called off by a value on the device."""

from torch_bridge.torch_xla.amp.syncfree.adam import Adam
from torch_bridge.torch_xla.amp.syncfree.adamw import AdamW
from torch_bridge.torch_xla.amp.syncfree.sgd import SGD

__all__ = ["SGD", "Adam", "AdamW"]
