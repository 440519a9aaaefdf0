"""`torch_xla.experimental.pjrt_backend`: importing it registers backend "xla" with torch.distributed, as
`torch_xla.distributed.xla_backend` does.
"""

from torch_bridge.torch_xla.distributed import xla_backend

__all__ = ["xla_backend"]
