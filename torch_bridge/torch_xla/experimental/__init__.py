"""`torch_xla.experimental`."""

from torch_bridge.torch_xla.experimental.eager import compile, eager_mode, eager_mode_context, is_eager_mode

__all__ = ["compile", "eager_mode", "eager_mode_context", "is_eager_mode"]
