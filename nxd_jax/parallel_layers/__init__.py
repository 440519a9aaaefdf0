"""`neuronx_distributed.parallel_layers`: groups of ranks, layers that they share out, losses, gradients and random numbers."""

from __future__ import annotations

import importlib
from typing import Any

from nxd_jax.parallel_layers import mappings, parallel_state
from nxd_jax.parallel_layers.layers import ColumnParallelLinear, ParallelEmbedding, RowParallelLinear
from nxd_jax.parallel_layers.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
    scatter_to_tensor_model_parallel_region,
)
from nxd_jax.parallel_layers.parallel_state import initialize_model_parallel
from nxd_jax.parallel_layers.utils import (
    copy_tensor_model_parallel_attributes,
    move_model_to_device,
    set_defaults_if_not_set_tensor_model_parallel_attributes,
    set_tensor_model_parallel_attributes,
    split_tensor_along_last_dim,
)

PARALLEL_MODULES = [ColumnParallelLinear, RowParallelLinear, ParallelEmbedding]
"""Modules that the pipeline partitioner does not look into."""

_LAZY = {
    "clip_grad_norm": "grads",
    "get_xla_rng_tracker": "random",
    "load": "checkpointing",
    "model_parallel_xla_manual_seed": "random",
    "parallel_cross_entropy": "loss_functions",
    "save": "checkpointing",
}
_SUBMODULES = ("checkpointing", "comm", "grads", "layer_norm", "layers", "layers_utils", "loss_functions", "pad", "random", "utils")

__all__ = [
    "PARALLEL_FUNCTIONS",
    "PARALLEL_MODULES",
    "ColumnParallelLinear",
    "ParallelEmbedding",
    "RowParallelLinear",
    "clip_grad_norm",
    "copy_tensor_model_parallel_attributes",
    "copy_to_tensor_model_parallel_region",
    "gather_from_tensor_model_parallel_region",
    "get_xla_rng_tracker",
    "initialize_model_parallel",
    "load",
    "mappings",
    "model_parallel_xla_manual_seed",
    "move_model_to_device",
    "parallel_cross_entropy",
    "parallel_state",
    "reduce_from_tensor_model_parallel_region",
    "save",
    "scatter_to_tensor_model_parallel_region",
    "set_defaults_if_not_set_tensor_model_parallel_attributes",
    "set_tensor_model_parallel_attributes",
    "split_tensor_along_last_dim",
]


def __getattr__(name: str) -> Any:
    if name == "PARALLEL_FUNCTIONS":
        value: Any = [__getattr__("parallel_cross_entropy")]
    elif name in _LAZY:
        value = getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
    elif name in _SUBMODULES:
        return importlib.import_module(f"{__name__}.{name}")
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value
