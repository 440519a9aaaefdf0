"""`torch_xla.utils.closures`: step closures live in `torch_bridge.steps`."""

from torch_bridge.steps import add_closure, mark

__all__ = ["add_closure", "mark"]
