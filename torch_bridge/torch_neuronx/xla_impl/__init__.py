"""`torch_neuronx.xla_impl`."""

from torch_bridge.torch_neuronx.xla_impl import base, custom_op, hint, ops

__all__ = ["base", "custom_op", "hint", "ops"]
