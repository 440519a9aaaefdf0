"""`neuronx_distributed.modules.moe.moe_fused_tkg`: the layer of Neuron's fused decode kernel, which is not needed here: `MoE` decodes in the step's program."""

from __future__ import annotations

from typing import Any

from nxd_jax.modules.moe.moe_configs import MoEFusedTKGConfig

__all__ = ["MoEFusedTKG", "MoEFusedTKGConfig"]


class MoEFusedTKG:
    """Cannot be made. Scripts that ask `MoE` for it (`init_tkg_module`, `tkg_config`) run, and `MoE` itself decodes.

    Raises NotImplementedError.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        raise NotImplementedError(
            f"{type(self).__name__} is a kernel of Neuron's: call MoE itself (in eval mode, with one token per sequence), which compiles to one program. "
            "MoE(..., init_tkg_module=True, tkg_config=...) is accepted"
        )

    def _can_use_nki_kernel(self, kernel_type: str, hidden_states: Any) -> bool:
        """NxD's switch, which scripts replace: no kernel runs here."""
        return False
