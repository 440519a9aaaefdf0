"""`_embedding_bag` (sum, mean, max) and its dense gradients.

Results have the shapes that torch gives outside CPU: `offset2bag` of the indices, `bag_size` of the offsets, and
`max_indices` of the output (empty unless mode is max).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import torch

from torch_bridge.lowerings.embedding import add_rows, occurrences
from torch_bridge.lowerings.indexing import Points
from torch_bridge.lowerings.registry import lowering

aten = torch.ops.aten
Array = jax.Array

SUM, MEAN, MAX = 0, 1, 2
"""What `mode` says of a bag."""


def _bags(indices: Array, offsets: Array) -> Array:
    """The bag of each index: the number of offsets at or before its position, less one."""
    starts = Points((indices.size + 1,), {0: offsets}, wrap=False)
    marks = starts.write(jnp.zeros(indices.size + 1, indices.dtype), jnp.ones(offsets.shape, indices.dtype), "sum")
    return jnp.cumsum(marks[:-1], dtype=indices.dtype) - 1


def _count(bags: Array, keep: Array, size: int) -> Array:
    return Points((size,), {0: bags}, wrap=False).write(jnp.zeros(size, bags.dtype), keep.astype(bags.dtype), "sum")


@lowering(aten._embedding_bag.default, aten._embedding_bag_forward_only.default)
def embedding_bag(
    weight: Array,
    indices: Array,
    offsets: Array,
    scale_grad_by_freq: bool = False,
    mode: int = SUM,
    sparse: bool = False,
    per_sample_weights: Array | None = None,
    include_last_offset: bool = False,
    padding_idx: int = -1,
) -> tuple[Array, Array, Array, Array]:
    """Indices equal to `padding_idx` count for nothing; empty bags are zero. The last bag goes to the end, whatever the last offset says, as on CUDA."""
    num_bags = offsets.size - bool(include_last_offset)
    bags = _bags(indices, offsets[:num_bags])
    keep = indices != padding_idx
    sizes = _count(bags, keep, offsets.size)
    rows = Points(weight.shape, {0: indices}, wrap=False).read(weight)
    if mode == MAX:
        out, winners = _bag_max(rows, indices, jnp.where(keep, bags, num_bags), num_bags)
        return out, bags, sizes, winners
    if per_sample_weights is not None:
        rows = rows * per_sample_weights[:, None].astype(rows.dtype)
    out = add_rows(rows, jnp.where(keep, bags, num_bags), num_bags)
    if mode == MEAN:
        out = out / jnp.maximum(sizes[:num_bags], 1)[:, None].astype(out.dtype)
    return out, bags, sizes, jnp.zeros(0, indices.dtype)


def _bag_max(rows: Array, indices: Array, bags: Array, num_bags: int) -> tuple[Array, Array]:
    """Per bag and column the maximum and the first index that has it; 0 and -1 for empty bags."""
    if not num_bags or not indices.size:
        shape = (num_bags, rows.shape[1])
        return jnp.zeros(shape, rows.dtype), jnp.full(shape, -1, indices.dtype)
    points = Points((num_bags, rows.shape[1]), {0: bags}, wrap=False)
    top = points.write(jnp.full((num_bags, rows.shape[1]), -jnp.inf, rows.dtype), jax.lax.stop_gradient(rows), "amax")
    position = jnp.arange(indices.size, dtype=indices.dtype)[:, None]
    is_top = (rows == points.read(top)) | jnp.isnan(rows)
    first = jnp.full(top.shape, indices.size, indices.dtype)
    first = points.write(first, jnp.where(is_top, position, indices.size), "amin")
    empty = first == indices.size
    at = jnp.minimum(first, indices.size - 1)
    out = jnp.where(empty, 0, jnp.take_along_axis(rows, at, axis=0))
    return out, jnp.where(empty, -1, indices[at])


@lowering(aten._embedding_bag_dense_backward.default)
def embedding_bag_dense_backward(
    grad: Array,
    indices: Array,
    offset2bag: Array,
    bag_size: Array,
    maximum_indices: Array,
    num_weights: int,
    scale_grad_by_freq: bool,
    mode: int,
    per_sample_weights: Array | None,
    padding_idx: int = -1,
) -> Array:
    if mode == MAX:
        return _max_backward(grad, maximum_indices, num_weights)
    rows = Points(grad.shape, {0: offset2bag}, wrap=False).read(grad)
    if per_sample_weights is not None:
        rows = rows * per_sample_weights[:, None].astype(rows.dtype)
    if mode == MEAN:
        rows = rows / jnp.maximum(bag_size[offset2bag], 1)[:, None].astype(rows.dtype)
    if scale_grad_by_freq:
        rows = rows / occurrences(indices, num_weights)[:, None].astype(rows.dtype)
    return add_rows(rows, jnp.where(indices == padding_idx, num_weights, indices), num_weights)


def _max_backward(grad: Array, winners: Array, num_weights: int) -> Array:
    columns = jnp.broadcast_to(jnp.arange(grad.shape[1]), grad.shape)
    points = Points((num_weights, grad.shape[1]), {0: jnp.where(winners < 0, num_weights, winners), 1: columns}, wrap=False)
    return points.write(jnp.zeros((num_weights, grad.shape[1]), grad.dtype), grad, "sum")


@lowering(aten._embedding_bag_backward.default)
def embedding_bag_backward(
    grad: Array,
    indices: Array,
    offsets: Array,
    offset2bag: Array,
    bag_size: Array,
    maximum_indices: Array,
    num_weights: int,
    scale_grad_by_freq: bool,
    mode: int,
    sparse: bool,
    per_sample_weights: Array | None,
    padding_idx: int = -1,
) -> Array:
    """Dense also for sparse=True, as in torch_xla."""
    return embedding_bag_dense_backward(
        grad, indices, offset2bag, bag_size, maximum_indices, num_weights, scale_grad_by_freq, mode, per_sample_weights, padding_idx
    )


@lowering(aten._embedding_bag_per_sample_weights_backward.default)
def embedding_bag_per_sample_weights_backward(
    grad: Array, weight: Array, indices: Array, offsets: Array, offset2bag: Array, mode: int, padding_idx: int = -1
) -> Array:
    rows = Points(weight.shape, {0: indices}, wrap=False).read(weight)
    grads = Points(grad.shape, {0: offset2bag}, wrap=False).read(grad)
    return jnp.where(indices == padding_idx, 0, jnp.sum(rows * grads, axis=1)).astype(grad.dtype)
