"""`neuronx_distributed`: the very modules of `nxd_jax`."""

from nxd_jax import _later
from torch_bridge import aliasing

aliasing.install(__name__, "nxd_jax")
_later.install()
