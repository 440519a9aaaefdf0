"""torch_bridge: run torch code on JAX. Device `"xla"`, `torch.fx` capture, and conversion of modules to JAX.

Importing it registers the device and starts nothing: JAX is imported when the first xla tensor is made or a name below is used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from torch_bridge.device.registration import register

if TYPE_CHECKING:
    from torch_bridge.export.graph_capture import capture
    from torch_bridge.export.jax_function import to_jax
    from torch_bridge.export.nnx_module import to_nnx
    from torch_bridge.export.optax_transform import to_optax
    from torch_bridge.per_rank.each_rank_factories import each_rank
    from torch_bridge.recorder.sharded import from_ranks, shards, varying
    from torch_bridge.replay.player import optimize, restore

_LAZY = {
    "capture": "torch_bridge.export.graph_capture",
    "each_rank": "torch_bridge.per_rank.each_rank_factories",
    "from_ranks": "torch_bridge.recorder.sharded",
    "hlo": "torch_bridge.export.hlo_text",
    "last_graphs": "torch_bridge.runtime.executor",
    "optimize": "torch_bridge.replay.player",
    "restore": "torch_bridge.replay.player",
    "shards": "torch_bridge.recorder.sharded",
    "to_jax": "torch_bridge.export.jax_function",
    "to_nnx": "torch_bridge.export.nnx_module",
    "to_optax": "torch_bridge.export.optax_transform",
    "varying": "torch_bridge.recorder.sharded",
}

__all__ = [
    "capture",
    "each_rank",
    "from_ranks",
    "hlo",
    "last_graphs",
    "optimize",
    "register",
    "restore",
    "shards",
    "to_jax",
    "to_nnx",
    "to_optax",
    "varying",
]

register()


_MODULES = {"rounding": "torch_bridge.precision.stochastic_rounding"}
"""Modules by the names that the documentation gives them."""


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(_MODULES[name])
    if name not in _LAZY:
        raise AttributeError(f"module 'torch_bridge' has no attribute {name!r}")
    value = getattr(importlib.import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
