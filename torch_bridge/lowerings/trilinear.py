"""`aten._trilinear`, the product of three tensors below `torch.nn.Bilinear`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import torch
from jax import lax

from torch_bridge.lowerings.registry import lowering
from torch_bridge.lowerings.types import Array

aten = torch.ops.aten


@lowering(aten._trilinear.default)
def _trilinear(
    i1: Array,
    i2: Array,
    i3: Array,
    expand1: Sequence[int],
    expand2: Sequence[int],
    expand3: Sequence[int],
    sumdim: Sequence[int],
    unroll_dim: int = 1,
) -> Array:
    """Each input gets size-1 dims at its `expand` places; the product of all three is summed over `sumdim`.

    That is an einsum over the dims of the product, in which an input lacks its expanded dims. `unroll_dim` only tells
    torch how to save memory.
    """
    rank = i1.ndim + len(expand1)
    dims = [[d for d in range(rank) if d not in expand] for expand in (expand1, expand2, expand3)]
    inputs: list[Any] = []
    for x, own in zip((i1, i2, i3), dims, strict=True):
        # einsum wants equal sizes, torch broadcasts size 1: drop such a dim, the other inputs carry it.
        single = tuple(i for i, d in enumerate(own) if x.shape[i] == 1 and any(d in other for other in dims if other is not own))
        inputs += [jnp.squeeze(x, single), [d for i, d in enumerate(own) if i not in single]]
    present = {d for own in inputs[1::2] for d in own}
    kept = [d for d in range(rank) if d not in sumdim]
    out = jnp.einsum(*inputs, [d for d in kept if d in present], precision=lax.Precision.HIGHEST)
    return jnp.expand_dims(out, tuple(i for i, d in enumerate(kept) if d not in present))
