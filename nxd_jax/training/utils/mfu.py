"""Model FLOPs utilization: the share of the devices' peak that a training's own arithmetic takes."""

from __future__ import annotations

from functools import cache

import jax

from nxd_jax.topology.device_peaks import peak_flops_of
from torch_bridge.mesh import world


def flops_per_token(parameters: float, layers: int, hidden: int, length: int) -> float:
    """Forward and backward: 6 for each parameter that a token meets, and causal attention over `length` tokens. Recomputation does not count."""
    return 6.0 * parameters + 6.0 * layers * hidden * length


@cache
def peak_flops() -> float | None:
    """Of all devices of the job together, bfloat16; None where it is not known: for the CPU, which stands for cores here, and devices without an entry."""
    kinds = {device.device_kind for device in jax.devices()}
    if len(kinds) != 1 or jax.default_backend() == "cpu":
        return None
    peak = peak_flops_of(*kinds)
    return None if peak is None else peak * min(len(jax.devices()), world.size())


def mfu(tokens_per_second: float, per_token: float | None) -> float | None:
    """The share, between 0 and 1; None where the model's arithmetic or the devices' peak is not known."""
    peak = peak_flops() if per_token else None
    return None if not per_token or not peak else tokens_per_second * per_token / peak
