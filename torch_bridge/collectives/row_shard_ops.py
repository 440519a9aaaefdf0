"""`row_shards` as ops of the graph: one reduces many tensors and cuts them by rows, one joins the parts again.

Parts lie side by side in buckets, and a bucket is one collective. Import this after `backend.ensure()` (which brings JAX up).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax import lax

from torch_bridge.collectives import collective_ops, rank_slices  # noqa: F401  # `rank_slice` for row_shards
from torch_bridge.ir import dtypes
from torch_bridge.lowerings import AxesRule, Stacks, lowering

_library = torch.library.Library("torch_bridge", "FRAGMENT")
_library.define(
    "scatter_rows(Tensor[] tensors, float scale, ScalarType? within, ScalarType dtype, int bucket, int count, str groups) -> Tensor[]"
)
_library.define("gather_rows(Tensor[] parts, int[] rows, ScalarType dtype, int bucket, int count, str groups) -> Tensor[]")
ops = torch.ops.torch_bridge
NUMBER = -1
"""In `rows`: a tensor without dims."""


def _part_shape(full: Sequence[int], count: int) -> list[int]:
    """A number counts as one row."""
    rows, *rest = full or (1,)
    return [math.ceil(rows / count), *rest]


def _whole_shape(part: Sequence[int], rows: int) -> list[int]:
    return [] if rows == NUMBER else [rows, *part[1:]]


def _scattered(
    tensors: Sequence[torch.Tensor], scale: float, within: torch.dtype | None, dtype: torch.dtype, bucket: int, count: int, groups: str
) -> Any:
    return [t.new_empty(_part_shape(t.shape, count), dtype=dtype) for t in tensors]


def _gathered(parts: Sequence[torch.Tensor], rows: Sequence[int], dtype: torch.dtype, bucket: int, count: int, groups: str) -> Any:
    return [t.new_empty(_whole_shape(t.shape, n), dtype=dtype) for t, n in zip(parts, rows, strict=True)]


for _name, _meta in (("scatter_rows", _scattered), ("gather_rows", _gathered)):
    _library.impl(_name, _meta, "Meta")
    _library.impl(_name, collective_ops._alone, "CPU")


@lowering(ops.scatter_rows.default, collective=True, axes=AxesRule.ADDS, entrywise=True, stacks=Stacks(lists=(0,), bucket=4))
def _scatter_rows(
    tensors: Sequence[jax.Array], scale: float, within: torch.dtype | None, dtype: torch.dtype, bucket: int, count: int, groups: str
) -> Any:
    if within is not None:
        tensors = [t.astype(dtypes.to_jax(within)) for t in tensors]
    shapes = [_part_shape(t.shape, count) for t in tensors]
    parts: list[Any] = [None] * len(tensors)
    for chosen in _buckets(tensors, 1, bucket):
        own = jnp.concatenate([_padded(tensors[i], shapes[i][0] * count).reshape(count, -1) for i in chosen], 1)
        if count > 1:
            own = collective_ops.scattered_sum(own, 0, count, collective_ops.lines(groups))
        own = (own * jnp.asarray(scale, own.dtype)).astype(dtypes.to_jax(dtype))
        for i, part in zip(chosen, _split(own, [math.prod(shapes[i]) for i in chosen]), strict=True):
            parts[i] = part.reshape(shapes[i])
    return parts


@lowering(ops.gather_rows.default, collective=True, axes=AxesRule.REMOVES, entrywise=True, stacks=Stacks(lists=(0,), constants=1, bucket=3))
def _gather_rows(parts: Sequence[jax.Array], rows: Sequence[int], dtype: torch.dtype, bucket: int, count: int, groups: str) -> Any:
    parts = [p.astype(dtypes.to_jax(dtype)) for p in parts]
    whole: list[Any] = [None] * len(parts)
    for chosen in _buckets(parts, count, bucket):
        every = jnp.concatenate([parts[i].reshape(1, -1) for i in chosen], 1)
        if count > 1:
            found = collective_ops.lines(groups)
            every = lax.all_gather(every, found.axes, axis=0, tiled=True, axis_index_groups=found.places)
        for i, joined in zip(chosen, _split(every, [parts[i].size for i in chosen]), strict=True):
            first, *rest = parts[i].shape
            shape = _whole_shape(parts[i].shape, rows[i])
            whole[i] = joined.reshape([count * first, *rest])[: shape[0] if shape else 1].reshape(shape)
    return whole


def _padded(full: jax.Array, rows: int) -> Any:
    full = full.reshape(1) if full.ndim == 0 else full
    return jnp.pad(full, [(0, rows - full.shape[0]), *[(0, 0)] * (full.ndim - 1)])


def _split(rows: jax.Array, sizes: Sequence[int]) -> Iterator[Any]:
    """Columns of a bucket, one block for each tensor."""
    start = 0
    for n in sizes:
        yield lax.slice_in_dim(rows, start, start + n, axis=1)
        start += n


def _buckets(arrays: Sequence[Any], times: int, cap: int) -> Iterator[list[int]]:
    """Places of arrays that travel together: of one dtype, in order, at most `cap` bytes (times `times`) or one array."""
    for kind in dict.fromkeys(x.dtype for x in arrays):
        chosen: list[int] = []
        total = 0
        for i in (i for i, x in enumerate(arrays) if x.dtype == kind):
            size = arrays[i].nbytes * times
            if chosen and total + size > cap:
                yield chosen
                chosen, total = [], 0
            chosen.append(i)
            total += size
        yield chosen
