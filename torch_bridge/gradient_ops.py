"""`clipping.sum_powers` as an op of the graph. Import this after `torch_bridge.recorder` (which brings JAX up)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import torch

from torch_bridge import clipping, dtypes
from torch_bridge.lowerings import lowering

_library = torch.library.Library("torch_bridge", "FRAGMENT")
_library.define("sum_powers(Tensor[] tensors, float p, ScalarType? dtype) -> Tensor[]")
ops = torch.ops.torch_bridge


def _meta(tensors: Sequence[torch.Tensor], p: float, dtype: torch.dtype | None) -> list[torch.Tensor]:
    return [t.new_empty((), dtype=dtype) for t in tensors]


_library.impl("sum_powers", _meta, "Meta")
_library.impl("sum_powers", clipping.sum_powers, "CPU")


@lowering(ops.sum_powers.default, lift=False)
def _sum_powers(tensors: Any, p: float, dtype: torch.dtype | None) -> list[Any]:
    return [_sum_of(t if dtype is None else t.astype(dtypes.to_jax(dtype)), p) for t in tensors]


def _sum_of(t: Any, p: float) -> Any:
    if p == math.inf:
        return jnp.abs(t).max() if t.size else jnp.zeros((), t.dtype)
    if p == 2:
        return (t * t).sum()
    return jnp.abs(t).sum() if p == 1 else (jnp.abs(t) ** jnp.asarray(p, t.dtype)).sum()
