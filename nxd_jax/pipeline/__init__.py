"""`neuronx_distributed.pipeline`: can be imported, not used. Scripts ask `isinstance(model, NxDPPModel)`, and no model here is one."""

from nxd_jax.pipeline.model import NxDPPModel

__all__ = ["NxDPPModel"]
