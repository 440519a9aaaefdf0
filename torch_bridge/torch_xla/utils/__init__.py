"""`torch_xla.utils`. Submodules are imported when first used."""

from __future__ import annotations

import importlib
from typing import Any

_SUBMODULES = ("checkpoint", "closures", "serialization", "utils")


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module 'torch_xla.utils' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_SUBMODULES})
