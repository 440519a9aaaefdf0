"""`neuronx_distributed`: the very modules of `nxd_jax`."""

from torch_bridge import aliasing

aliasing.install(__name__, "nxd_jax")
