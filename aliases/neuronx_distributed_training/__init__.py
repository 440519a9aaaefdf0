"""`neuronx_distributed_training`: the very modules of `nxd_jax.training`."""

import torch_bridge.torch_xla.distributed.xla_backend  # noqa: F401
from torch_bridge.device import aliasing

aliasing.install(__name__, "nxd_jax.training")
