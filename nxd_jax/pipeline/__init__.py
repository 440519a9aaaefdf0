"""`neuronx_distributed.pipeline`: models whose layers lie on several pipeline ranks."""

from nxd_jax.pipeline.model import NxDPPModel

__all__ = ["NxDPPModel"]
