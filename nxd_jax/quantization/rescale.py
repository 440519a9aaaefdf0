"""OCP's float8 checkpoints in Neuron's range. (NxD has a script in its documentation.)

OCP's float8_e4m3fn goes up to 448, Neuron's up to 240: numbers are multiplied by 240 / 448, and their scales by 448 / 240.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch

from nxd_jax.quantization.quantization_config import DtypeBound

logger = logging.getLogger("nxd_jax")

FP8_SCALING_FACTOR: float = DtypeBound.F8E4M3FN_MAX.value / DtypeBound.F8E4M3_MAX.value
SUFFIXES = (".weight_scale", ".scale", ".weight_scale_inv")
"""How names of scales end, in place of `.weight`."""


def rescale(weight: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(numbers within 240, their float32 scale) that stand for nearly the same weight: numbers are rounded anew, which costs up to 1/16 of each.

    Raises TypeError for another dtype than float8_e4m3fn.
    """
    if weight.dtype is not torch.float8_e4m3fn:
        raise TypeError(f"a weight of {weight.dtype} has no OCP range to leave: only torch.float8_e4m3fn is rescaled")
    return (weight.to(torch.float32) / FP8_SCALING_FACTOR).to(weight.dtype), scale.to(torch.float32) * FP8_SCALING_FACTOR


def rescale_state_dict(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """A state dict whose float8_e4m3fn weights lie within 240, with their scales; the given one stays as it is.

    A weight `x.weight` has its scale under `x.weight_scale`, `x.scale` or `x.weight_scale_inv` (a factor, too, whatever its name says). Weights that are
    within 240 are left alone. Raises ValueError for a weight beyond it that has no scale.
    """
    found = dict(state_dict)
    for name, weight in state_dict.items():
        if not isinstance(weight, torch.Tensor) or weight.dtype is not torch.float8_e4m3fn:
            continue
        if not bool((weight.to(torch.float32).abs() > DtypeBound.F8E4M3_MAX.value).any()):
            continue
        names = [name.removesuffix(".weight") + suffix for suffix in SUFFIXES] if name.endswith(".weight") else []
        scale = next((key for key in names if key in state_dict), None)
        if scale is None:
            raise ValueError(
                f"{name} has numbers beyond 240 and no scale beside it (looked for {', '.join(names) or 'x.weight alone has one'})"
            )
        found[name], found[scale] = rescale(weight, state_dict[scale])
    return found
