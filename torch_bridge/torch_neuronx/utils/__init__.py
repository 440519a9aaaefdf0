"""`torch_neuronx.utils`."""

from torch_bridge.torch_neuronx.utils.utils import SUPPORTED_TYPES, get_platform_target

__all__ = ["SUPPORTED_TYPES", "get_platform_target"]
