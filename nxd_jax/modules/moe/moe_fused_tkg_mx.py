"""`neuronx_distributed.modules.moe.moe_fused_tkg_mx`: the same for weights in MXFP4."""

from __future__ import annotations

from nxd_jax.modules.moe.moe_fused_tkg import MoEFusedTKG

__all__ = ["MoEFusedTKGMX"]


class MoEFusedTKGMX(MoEFusedTKG):
    """Cannot be made, as `MoEFusedTKG`. Raises NotImplementedError."""
