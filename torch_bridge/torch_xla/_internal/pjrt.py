"""`torch_xla._internal.pjrt`."""

from torch_bridge.torch_xla.distributed.xla_multiprocessing import spawn

__all__ = ["spawn"]
