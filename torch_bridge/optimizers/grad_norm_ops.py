"""`grad_norm.sum_powers` as an op of the graph. Import this after `backend.ensure()` (which brings JAX up)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch

from torch_bridge.ir import dtypes
from torch_bridge.lowerings import Stacks, lowering
from torch_bridge.optimizers import grad_norm

_library = torch.library.Library("torch_bridge", "FRAGMENT")
_library.define("sum_powers(Tensor[] tensors, float p, ScalarType? dtype) -> Tensor[]")
ops = torch.ops.torch_bridge


def _meta(tensors: Sequence[torch.Tensor], p: float, dtype: torch.dtype | None) -> list[torch.Tensor]:
    return [t.new_empty((), dtype=dtype) for t in tensors]


_library.impl("sum_powers", _meta, "Meta")
_library.impl("sum_powers", grad_norm.sum_powers, "CPU")


@lowering(ops.sum_powers.default, entrywise=True, stacks=Stacks(lists=(0,)), lift=False)
def _sum_powers(tensors: Sequence[jax.Array], p: float, dtype: torch.dtype | None) -> list[Any]:
    return [_sum_of(t if dtype is None else t.astype(dtypes.to_jax(dtype)), p) for t in tensors]


def _sum_of(t: jax.Array, p: float) -> Any:
    if p == math.inf:
        return jnp.abs(t).max() if t.size else jnp.zeros((), t.dtype)
    if p == 2:
        return (t * t).sum()
    return jnp.abs(t).sum() if p == 1 else (jnp.abs(t) ** jnp.asarray(p, t.dtype)).sum()
