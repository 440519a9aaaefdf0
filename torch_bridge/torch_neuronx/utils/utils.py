"""`torch_neuronx.utils.utils`."""

from __future__ import annotations

import os

from torch_bridge.config.variables import PLATFORMS

SUPPORTED_TYPES = list(PLATFORMS)
"""Platform targets: those that can be emulated."""

_DEFAULT = "trn1"


def get_platform_target() -> str:
    """`torch_neuronx.utils.get_platform_target`: the chip that scripts should believe in: `NEURON_PLATFORM_TARGET_OVERRIDE`, or "trn1"."""
    target = os.environ.get("NEURON_PLATFORM_TARGET_OVERRIDE", "").strip().lower() or _DEFAULT
    if target not in SUPPORTED_TYPES:
        raise ValueError(f"NEURON_PLATFORM_TARGET_OVERRIDE={target!r} is not a platform target; use one of {', '.join(SUPPORTED_TYPES)}")
    return target
