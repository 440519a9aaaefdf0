"""`neuronx_distributed`: the very modules of `nxd_jax`. Like the original it registers backend "xla" with torch.distributed.

With it `torch.jit.load` reads files of traced models.
"""

import nxd_jax.trace  # noqa: F401
import torch_bridge.torch_xla.distributed.xla_backend  # noqa: F401
from nxd_jax import _later
from torch_bridge.device import aliasing

aliasing.install(__name__, "nxd_jax")
_later.install()
