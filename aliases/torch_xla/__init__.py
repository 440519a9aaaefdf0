"""`torch_xla`: the very modules of `torch_bridge.torch_xla`."""

from torch_bridge.device import aliasing

aliasing.install(__name__, "torch_bridge.torch_xla")
