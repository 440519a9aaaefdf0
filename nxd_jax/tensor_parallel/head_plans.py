"""Attention heads on tensor-parallel ranks that they do not divide by: copies of K/V heads, and heads of zeros.

A padded query head is a row block of zeros that the output projection multiplies by zeros, so results are those of the model as it was.
"""

from __future__ import annotations

import dataclasses
import enum

import torch

from nxd_jax.tensor_parallel.head_padding import get_number_of_extra_heads

Places = tuple[int | None, ...]
"""For each head that ranks hold, in their order: which of the model's it is; None: zeros."""


class GQA(enum.Enum):
    """`gqa.GQA`: what is done with fewer K/V heads than ranks."""

    CONVERT_TO_MHA = "convert-to-mha"
    """A K/V head for every query head; zeros at the end. Fits any number of ranks."""
    REPLICATE_TO_TP_DEGREE = "replicate-to-tp-degree"
    """A K/V head for every rank; zeros at the end of each group of query heads. Needs ranks that are a multiple of the K/V heads."""


@dataclasses.dataclass(frozen=True)
class HeadPlan:
    """Query and K/V heads in the order of the ranks, each rank having equally many. strategy: None where nothing has to be changed but padding."""

    query: Places
    kv: Places
    strategy: GQA | None

    @property
    def group(self) -> int:
        """Query heads that a K/V head serves."""
        return len(self.query) // len(self.kv)


def plan(heads: int, kv_heads: int, tp: int, wanted: GQA | None = None) -> HeadPlan:
    """How `tp` ranks share out heads: `gqa.get_shardable_head_counts` with the order.

    wanted: default REPLICATE_TO_TP_DEGREE, and CONVERT_TO_MHA where tp is no multiple of kv_heads. K/V heads that divide by the ranks stay as they are.
    Raises ValueError for heads that are no multiple of kv_heads.
    """
    if kv_heads < 1 or heads % kv_heads:
        raise ValueError(f"{heads} attention heads must be a multiple of {kv_heads} K/V heads")
    size = heads // kv_heads
    padded = heads + get_number_of_extra_heads(heads, tp)
    tail: Places = (None,) * (padded - heads)
    every: Places = tuple(range(heads))
    if kv_heads % tp == 0:
        return HeadPlan(every, tuple(range(kv_heads)), None)
    if heads == kv_heads:
        return HeadPlan(every + tail, every + tail, None)
    if tp % kv_heads or wanted is GQA.CONVERT_TO_MHA:
        return HeadPlan(every + tail, tuple(h // size for h in range(heads)) + tail, GQA.CONVERT_TO_MHA)
    slots = padded // kv_heads
    query = tuple(k * size + j if j < size else None for k in range(kv_heads) for j in range(slots))
    return HeadPlan(query, tuple(k for k in range(kv_heads) for _ in range(tp // kv_heads)), GQA.REPLICATE_TO_TP_DEGREE)


def arranged(full: torch.Tensor, places: Places, heads: int, dim: int = 0) -> torch.Tensor:
    """A full weight or bias with blocks of heads along `dim` in another order, with copies and zeros. heads: that the weight has.

    Raises RuntimeError for a weight that has no such blocks.
    """
    if full.shape[dim] % heads:
        raise RuntimeError(f"a tensor of shape {list(full.shape)} does not hold {heads} heads along dim {dim}")
    if places == tuple(range(heads)):
        return full
    blocks = full.unflatten(dim, (heads, -1))
    found = blocks.index_select(dim, torch.tensor([0 if h is None else h for h in places]))
    if None in places:
        keep = torch.tensor([h is not None for h in places]).reshape([-1 if d == dim else 1 for d in range(found.dim())])
        found = torch.where(keep, found, torch.zeros((), dtype=found.dtype))
    return found.flatten(dim, dim + 1)
