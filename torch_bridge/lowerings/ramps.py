"""`ramp`: what `arange` is where its numbers are inputs of the program (`ir.number_families`); its length stays part of the program."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import torch
from jax import lax

from torch_bridge.ir import dtypes
from torch_bridge.lowerings.registry import lowering
from torch_bridge.lowerings.types import Scalar

_library = torch.library.Library("torch_bridge", "FRAGMENT")
_library.define("ramp(Scalar start, Scalar step, int size, ScalarType dtype) -> Tensor")


def _on_cpu(start: int, step: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(start, start + size * step, step, dtype=dtype)


def _on_meta(start: int, step: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty((size,), dtype=dtype, device="meta")


_library.impl("ramp", _on_cpu, "CompositeExplicitAutograd")
_library.impl("ramp", _on_meta, "Meta")


@lowering(torch.ops.torch_bridge.ramp.default)
def ramp(start: Scalar, step: Scalar, size: int, dtype: torch.dtype) -> jax.Array:
    """start + i * step for two integers, computed as `arange` does: in float64 for floats, else in int64."""
    work = jnp.float64 if dtype.is_floating_point else jnp.int64
    return (lax.iota(work, size) * dtypes.cast(step, work) + dtypes.cast(start, work)).astype(dtypes.to_jax(dtype))
