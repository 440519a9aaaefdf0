"""Each rank's own number inside the graph, as ops: the number itself, and slices that start at it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch

from torch_bridge.lowerings import lowering
from torch_bridge.mesh import world
from torch_bridge.mesh.axis_numbers import own

_library = torch.library.Library("torch_bridge", "FRAGMENT")
_library.define("rank_int(int[] values) -> Tensor")
_library.define("rank_float(float[] values) -> Tensor")
_library.define("rank_slice(Tensor x, int dim, int[] starts, int length) -> Tensor")
_library.define("rank_slice_write(Tensor x, Tensor part, int dim, int[] starts) -> Tensor")
_library.define("rank_slice_backward(Tensor grad, int[] size, int dim, int[] starts) -> Tensor")


def _slice_meta(x: torch.Tensor, dim: int, starts: Sequence[int], length: int) -> torch.Tensor:
    size = list(x.shape)
    size[dim] = length
    return torch.empty(size, dtype=x.dtype, device=x.device)


def _backward_meta(grad: torch.Tensor, size: Sequence[int], dim: int, starts: Sequence[int]) -> torch.Tensor:
    return torch.empty(size, dtype=grad.dtype, device=grad.device)


def _slice_cpu(x: torch.Tensor, dim: int, starts: Sequence[int], length: int) -> torch.Tensor:
    return x.narrow(dim, starts[world.first()], length).clone()


def _backward_cpu(grad: torch.Tensor, size: Sequence[int], dim: int, starts: Sequence[int]) -> torch.Tensor:
    out = grad.new_zeros(size)
    out.narrow(dim, starts[world.first()], grad.shape[dim]).copy_(grad)
    return out


def _write_cpu(x: torch.Tensor, part: torch.Tensor, dim: int, starts: Sequence[int]) -> torch.Tensor:
    out = x.clone()
    out.narrow(dim, starts[world.first()], part.shape[dim]).copy_(part)
    return out


_library.impl("rank_slice_write", lambda x, part, dim, starts: x.new_empty(x.shape), "Meta")
_library.impl("rank_slice_write", _write_cpu, "CPU")
_library.impl("rank_int", lambda values: torch.tensor(values[world.first()]), "CompositeExplicitAutograd")
_library.impl("rank_float", lambda values: torch.tensor(values[world.first()], dtype=torch.float64), "CompositeExplicitAutograd")
_library.impl("rank_slice", _slice_meta, "Meta")
_library.impl("rank_slice_backward", _backward_meta, "Meta")
_library.impl("rank_slice", _slice_cpu, "CPU")
_library.impl("rank_slice_backward", _backward_cpu, "CPU")
ops = torch.ops.torch_bridge


@lowering(ops.rank_int.default, rank_table=0)
def _rank_int(values: Sequence[int]) -> Any:
    return own(values, jnp.int64)


@lowering(ops.rank_float.default, rank_table=0)
def _rank_float(values: Sequence[float]) -> Any:
    return own(values, jnp.float64)


@lowering(ops.rank_slice.default, rank_table=2)
def _rank_slice(x: jax.Array, dim: int, starts: Sequence[int], length: int) -> Any:
    return jax.lax.dynamic_slice_in_dim(x, own(starts, jnp.int32), length, dim)


@lowering(ops.rank_slice_write.default, rank_table=3)
def _rank_slice_write(x: jax.Array, part: jax.Array, dim: int, starts: Sequence[int]) -> Any:
    return jax.lax.dynamic_update_slice_in_dim(x, part, own(starts, jnp.int32), dim)


@lowering(ops.rank_slice_backward.default, rank_table=3)
def _rank_slice_backward(grad: jax.Array, size: Sequence[int], dim: int, starts: Sequence[int]) -> Any:
    return jax.lax.dynamic_update_slice_in_dim(jnp.zeros(tuple(size), grad.dtype), grad, own(starts, jnp.int32), dim)
