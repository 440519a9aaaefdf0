"""`segment_reduce`: reductions over consecutive stretches of one axis, whose lengths (or offsets) are values.

Positions after the last segment belong to none. The work arrays are `x_BLT`, `ids_BL` and `length_BS`: batch (dims before the axis), position
along it, segment, and the rest.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import torch
from jax import lax

from torch_bridge.ir import dtypes
from torch_bridge.lowerings.registry import lowering
from torch_bridge.lowerings.types import Array, Dims, Scalar

aten = torch.ops.aten

_REDUCERS: dict[str, tuple[Callable[..., Array], float]] = {
    "sum": (jax.ops.segment_sum, 0.0),
    "mean": (jax.ops.segment_sum, 0.0),
    "prod": (jax.ops.segment_prod, 1.0),
    "max": (jax.ops.segment_max, -math.inf),
    "min": (jax.ops.segment_min, math.inf),
}
"""How each reduction gathers a segment, and what it starts from."""


def _fold(reduce: str, x_BLT: Array, ids_BL: Array, segments: int) -> Array:
    fn = _REDUCERS[reduce][0]
    return jax.vmap(lambda x, ids: fn(x, ids, num_segments=segments))(x_BLT, ids_BL)


class _Segments:
    """Where the segments of an array lie."""

    def __init__(self, shape: tuple[int, ...], lengths: Array | None, offsets: Array | None, axis: int):
        axis %= len(shape)
        if lengths is None:
            assert offsets is not None
            start, lengths = offsets[..., :1], jnp.diff(offsets, axis=-1)
        else:
            start = jnp.zeros_like(lengths[..., :1])
        self.count = lengths.shape[-1]
        batch, length, rest = math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :])
        self.flat = (batch, length, rest)
        self.result = (*shape[:axis], self.count, *shape[axis + 1 :])
        self.length_BS = lengths.reshape(batch, self.count)
        first = jnp.broadcast_to(start, (*lengths.shape[:-1], 1)).reshape(batch, 1)
        ends_BS = first + jnp.cumsum(self.length_BS, axis=1)
        position = jnp.arange(length)
        ids = jax.vmap(lambda ends: jnp.searchsorted(ends, position, side="right"))(ends_BS)
        self.ids_BL = jnp.where(position[None] < first, self.count, ids)  # those outside are dropped
        self.inside = (self.ids_BL < self.count)[..., None]

    def spread(self, y_BST: Array) -> Array:
        """Each position's value of its segment."""
        ids = jnp.minimum(self.ids_BL, max(self.count - 1, 0))[..., None]
        return jnp.take_along_axis(y_BST, ids, axis=1)


@lowering(aten.segment_reduce.default, lift=False)
def segment_reduce(
    data: Array,
    reduce: str,
    *,
    lengths: Array | None = None,
    indices: Array | None = None,
    offsets: Array | None = None,
    axis: int = 0,
    unsafe: bool = False,
    initial: Scalar | None = None,
) -> Array:
    """An empty segment gives `initial`, or what the reduction starts from; the mean of one is NaN."""
    at = _Segments(data.shape, lengths, offsets, axis)
    start = dtypes.cast(_REDUCERS[reduce][1] if initial is None else initial, data.dtype)
    out = _fold(reduce, data.reshape(at.flat), at.ids_BL, at.count)
    length = at.length_BS[..., None].astype(data.dtype)
    if reduce in ("sum", "mean"):
        out = out + start
    elif reduce == "prod":
        out = out * start
    else:
        out = (jnp.maximum if reduce == "max" else jnp.minimum)(out, start)
    if reduce == "mean":
        empty = jnp.asarray(math.nan, data.dtype) if initial is None else start
        out = jnp.where(length > 0, out / jnp.maximum(length, 1), empty)
    return out.reshape(at.result)


@lowering(aten._segment_reduce_backward.default, lift=False)
def segment_reduce_backward(
    grad: Array,
    output: Array,
    data: Array,
    reduce: str,
    *,
    lengths: Array | None = None,
    offsets: Array | None = None,
    axis: int = 0,
    initial: Scalar | None = None,
) -> Array:
    """Ties of a maximum share a positive gradient evenly; of a negative one each gets the whole, as in torch's kernels."""
    at = _Segments(data.shape, lengths, offsets, axis)
    flat = (at.flat[0], at.count, at.flat[2])
    if not at.count:
        return jnp.zeros_like(data)
    x, g = data.reshape(at.flat), at.spread(grad.reshape(flat))
    if reduce == "mean":
        g = g / at.spread(jnp.maximum(at.length_BS, 1)[..., None].astype(data.dtype))
    elif reduce == "prod":
        g = g * _other_factors(at, x, output.reshape(flat), initial)
    elif reduce != "sum":
        top = at.spread(output.reshape(flat))
        chosen = ((x == top) | jnp.isnan(x)).astype(x.dtype)
        ties = at.spread(_fold("sum", chosen, at.ids_BL, at.count))
        g = g * chosen / jnp.where(g > 0, jnp.maximum(ties, 1), 1)
    return jnp.where(at.inside, g, 0).reshape(data.shape).astype(data.dtype)


def _other_factors(at: _Segments, x: Array, product: Array, initial: Scalar | None) -> Array:
    """The product of a segment without each of its elements."""
    zero = x == 0
    zeros = at.spread(_fold("sum", zero.astype(jnp.int32), at.ids_BL, at.count))
    start = dtypes.cast(1 if initial is None else initial, x.dtype)
    nonzero = at.spread(_fold("prod", jnp.where(zero, 1, x), at.ids_BL, at.count)) * start
    alone = jnp.where(zero & (zeros == 1), nonzero, 0)
    return jnp.where(zeros == 0, at.spread(product) / jnp.where(zero, 1, x), alone)


@lowering(aten.hash_tensor.default)
def hash_tensor(self: Array, dim: Dims = (), *, keepdim: bool = False, mode: int = 0) -> Array:
    """The exclusive or of the elements' bits: of floating-point numbers as float64, of integers as int64."""
    if mode != 0:
        raise NotImplementedError(f"aten.hash_tensor with mode={mode}: only mode=0, the exclusive or of all bits, is known")
    wide = (
        lax.bitcast_convert_type(self.astype(jnp.float64), jnp.uint64)
        if jnp.issubdtype(self.dtype, jnp.floating)
        else self.astype(jnp.uint64)
    )
    dims = tuple(d % self.ndim for d in ((dim,) if isinstance(dim, int) else dim)) if self.ndim else ()
    axes = dims or tuple(range(self.ndim))
    out = lax.reduce(wide, jnp.uint64(0), lax.bitwise_xor, axes)
    return jnp.expand_dims(out, axes) if keepdim else out
