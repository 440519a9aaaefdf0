"""Attention whose inputs and result are divided over a mesh: `flash_attention(partition_spec=, mesh=)`."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

import torch

from torch_bridge.torch_xla.distributed.spmd import meshes, xla_sharding
from torch_bridge.torch_xla.distributed.spmd.meshes import Mesh, ShardingError


def divider(spec: Any, mesh: Mesh | str | None) -> Callable[[torch.Tensor], torch.Tensor]:
    """What divides a tensor, and its gradient, so. Raises `ShardingError` for no mesh, and for text that is none."""
    on = Mesh.from_str(mesh) if isinstance(mesh, str) else mesh if mesh is not None else meshes.get_global_mesh()
    if on is None:
        raise ShardingError("flash_attention(partition_spec=...): give a mesh (mesh=...), or set one (xs.set_global_mesh)")
    read = _read(spec) if isinstance(spec, str) else spec
    return lambda t: xla_sharding.mark_sharding_with_gradients(t, on, read)


def _read(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError) as error:
        raise ShardingError(f"partition_spec {text!r} is no tuple: write it as \"('data', None, None, None)\"") from error
