"""The variable XLA_USE_SPMD: annotations without a call of `xr.use_spmd()`."""

from __future__ import annotations

from torch_bridge.config.variables import VARIABLES
from torch_bridge.mesh.spmd_mode import MODE, active


def begin_if_asked() -> bool:
    """Whether annotations are on, after switching them on if `XLA_USE_SPMD` says so."""
    if not active() and not MODE.stopping and VARIABLES["XLA_USE_SPMD"].now():
        from torch_bridge.mesh import spmd

        spmd.use()
    return active()
