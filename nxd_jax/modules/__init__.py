"""`neuronx_distributed.modules`: blocks built on the parallel layers. Submodules are imported when first used."""

from __future__ import annotations

import importlib
from typing import Any

_SUBMODULES = ("attention", "lora", "moe", "qkv_linear", "qkv_linear_utils", "rms_norm")


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
