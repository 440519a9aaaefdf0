"""torch_bridge: run torch code on JAX. Device `"xla"`, `torch.fx` capture, and conversion of modules to JAX.

Importing it registers the device and starts nothing: JAX is imported when the first xla tensor is made or a name below is used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from torch_bridge.device import register

if TYPE_CHECKING:
    from torch_bridge.capturing import capture
    from torch_bridge.jax_function import to_jax
    from torch_bridge.nnx_module import to_nnx
    from torch_bridge.replay import optimize, restore
    from torch_bridge.sharded import from_ranks, shards, varying

_LAZY = {
    "capture": "torch_bridge.capturing",
    "from_ranks": "torch_bridge.sharded",
    "hlo": "torch_bridge.hlo_text",
    "last_graphs": "torch_bridge.executor",
    "optimize": "torch_bridge.replay",
    "restore": "torch_bridge.replay",
    "shards": "torch_bridge.sharded",
    "to_jax": "torch_bridge.jax_function",
    "to_nnx": "torch_bridge.nnx_module",
    "varying": "torch_bridge.sharded",
}

__all__ = ["capture", "from_ranks", "hlo", "last_graphs", "optimize", "register", "restore", "shards", "to_jax", "to_nnx", "varying"]

register()


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'torch_bridge' has no attribute {name!r}")
    value = getattr(importlib.import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
