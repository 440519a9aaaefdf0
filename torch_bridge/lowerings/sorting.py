"""`sort`, `topk`, binary searches, `isin` and `histc`. NaN is larger than every number, as in torch."""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
import torch
from jax import lax

from torch_bridge.ir import dtypes
from torch_bridge.lowerings.indexing import Points
from torch_bridge.lowerings.registry import lowering
from torch_bridge.lowerings.scatter import gather_along
from torch_bridge.lowerings.shapes import wrap_dim
from torch_bridge.lowerings.types import Array, Operand, Scalar

aten = torch.ops.aten


@lowering(aten.sort.default)
def sort(self: Array, dim: int = -1, descending: bool = False) -> tuple[Array, Array]:
    """Always stable, which torch's CPU sort is too."""
    if self.ndim == 0:
        return self, jnp.zeros((), jnp.int64)
    dim = wrap_dim(dim, self.ndim)
    if self.dtype.itemsize <= 4 and self.shape[dim] < 2**32:
        indices = _packed_argsort(self, dim, descending)
        return gather_along(self, dim, indices), indices
    position = lax.broadcasted_iota(jnp.int64, self.shape, dim)
    if not descending:
        values, indices = lax.sort((self, position), dimension=dim, is_stable=True, num_keys=1)
        return values, indices
    # Reversing before and after an ascending stable sort keeps ties in their order.
    operands = (lax.rev(self, [dim]), lax.rev(position, [dim]))
    values, indices = lax.sort(operands, dimension=dim, is_stable=True, num_keys=1)
    return lax.rev(values, [dim]), lax.rev(indices, [dim])


@lowering(aten.sort.stable)
def sort_stable(self: Array, stable: bool | None = None, dim: int = -1, descending: bool = False) -> tuple[Array, Array]:
    return sort(self, dim, descending)


def _packed_argsort(x: Array, dim: int, descending: bool) -> Array:
    """Sort single int64s, the key above the position: XLA does that 4 to 8 times faster on CPU than key-position pairs."""
    key = _ordered_int32(x)
    high = (~key if descending else key).astype(jnp.int64) << 32
    packed = lax.sort(high | lax.broadcasted_iota(jnp.int64, x.shape, dim), dimension=dim, is_stable=False)
    return packed & 0xFFFFFFFF


def _ordered_int32(x: Array) -> Array:
    """Integers in the order of a type of at most 32 bits: zeros of both signs are equal, NaN is the largest."""
    if x.dtype == jnp.uint32:
        return lax.bitcast_convert_type(x ^ jnp.uint32(1 << 31), jnp.int32)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x.astype(jnp.int32)
    x = lax.stop_gradient(x).astype(jnp.float32)
    bits = lax.bitcast_convert_type(jnp.where(x == 0, 0, x), jnp.int32)
    limits = jnp.iinfo(jnp.int32)
    return jnp.where(jnp.isnan(x), limits.max, jnp.where(bits < 0, limits.min - bits, bits))


@lowering(aten.topk.default)
def topk(self: Array, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> tuple[Array, Array]:
    """In order even where `sorted=False`; of equal elements the first ones (torch leaves their order open)."""
    if self.ndim == 0:
        return self, jnp.zeros((), jnp.int64)
    x = jnp.moveaxis(self, dim, -1)
    if x.dtype in (jnp.int32, jnp.uint32):
        indices = _packed_argsort(x, x.ndim - 1, largest)[..., :k]
    else:
        indices = lax.top_k(_top_key(x, largest), k)[1].astype(jnp.int64)
    values = gather_along(x, x.ndim - 1, indices)
    return jnp.moveaxis(values, -1, dim), jnp.moveaxis(indices, -1, dim)


def _top_key(x: Array, largest: bool) -> Array:
    """What XLA's top-k puts first as torch would: float32 if that is exact (its fast path), NaN of the sign that sorts right."""
    if jnp.issubdtype(x.dtype, jnp.floating):
        x = lax.stop_gradient(x)
        x = x if x.dtype == jnp.float64 else x.astype(jnp.float32)
        nan = jnp.asarray(jnp.nan, x.dtype)
        return jnp.where(jnp.isnan(x), nan, x) if largest else jnp.where(jnp.isnan(x), -nan, -x)
    if x.dtype.itemsize <= 2:
        x = x.astype(jnp.float32)
        return x if largest else -x
    return x if largest else ~x


def _bisect(size: int, shape: tuple[int, ...], go_right: Callable[[Array], Array]) -> Array:
    """torch's binary search, unrolled: `go_right(middle)` tells whether the answer lies right of a position."""
    low, high = jnp.zeros(shape, jnp.int64), jnp.full(shape, size, jnp.int64)
    for _ in range(size.bit_length()):
        middle = low + (high - low) // 2
        open_ = low < high
        right = go_right(jnp.minimum(middle, size - 1)) & open_
        low, high = jnp.where(right, middle + 1, low), jnp.where(open_ & ~right, middle, high)
    return low


def _search(sequence: Array, values: Array, right: bool) -> Array:
    """For each value its place in the last dim of a sorted sequence, which is 1-d or batched like the values."""
    size = sequence.shape[-1]
    if size == 0 or values.size == 0:
        return jnp.zeros(values.shape, jnp.int64)

    def element(at: Array) -> Array:
        if sequence.ndim == 1:
            return sequence.at[at].get(mode="promise_in_bounds", wrap_negative_indices=False)
        return gather_along(sequence, sequence.ndim - 1, at)

    # Negated as in torch, which decides where NaN goes.
    return _bisect(size, values.shape, lambda at: ~(element(at) > values) if right else ~(element(at) >= values))


@lowering(aten.searchsorted.Tensor, aten.searchsorted.Scalar)
def searchsorted(
    sorted_sequence: Array,
    self: Operand,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Array | None = None,
) -> Array:
    sequence, values = dtypes.promote(sorted_sequence, self)
    if sorter is not None:
        sequence = gather_along(sequence, sequence.ndim - 1, sorter)
    found = _search(sequence, values, right or side == "right")
    return found.astype(jnp.int32) if out_int32 else found


@lowering(aten.bucketize.Tensor, aten.bucketize.Scalar)
def bucketize(self: Operand, boundaries: Array, out_int32: bool = False, right: bool = False) -> Array:
    return searchsorted(boundaries, self, out_int32, right)


_FEW_TESTS = 16


@lowering(aten.isin.Tensor_Tensor, aten.isin.Tensor_Scalar, aten.isin.Scalar_Tensor)
def isin(elements: Operand, test_elements: Operand, assume_unique: bool = False, invert: bool = False) -> Array:
    """Few test elements are compared one by one, many are sorted and searched."""
    x, tests = dtypes.promote(elements, test_elements)
    tests = tests.reshape(-1)
    if tests.size == 0:
        found = jnp.zeros(x.shape, jnp.bool_)
    elif tests.size <= _FEW_TESTS:
        found = jnp.any(x[..., None] == tests, axis=-1)
    else:
        tests = jnp.sort(tests)  # NaN last
        at = _bisect(tests.size, x.shape, lambda middle: tests[middle] < x)
        found = tests[jnp.minimum(at, tests.size - 1)] == x
    return ~found if invert else found


@lowering(aten.histc.default)
def histc(self: Array, bins: int = 100, min: Scalar = 0, max: Scalar = 0) -> Array:
    """Counts of equal bins from `min` to `max`; equal bounds stand for the range of the data. NaN falls in no bin.

    Integers count too, as on CUDA (torch's CPU kernel refuses them): models ask for that on devices other than the CPU.
    """
    x = self.reshape(-1) if jnp.issubdtype(self.dtype, jnp.floating) else self.reshape(-1).astype(jnp.int64)
    low, high = dtypes.cast(min, x.dtype), dtypes.cast(max, x.dtype)
    if x.size:
        from_data = low == high
        low, high = jnp.where(from_data, x.min(), low), jnp.where(from_data, x.max(), high)
    flat = low == high
    low, high = jnp.where(flat, low - 1, low), jnp.where(flat, high + 1, high)
    inside = (x >= low) & (x <= high)
    if jnp.issubdtype(x.dtype, jnp.floating):
        at = jnp.minimum(((x - low) / (high - low) * bins).astype(jnp.int64), bins - 1)
    else:
        at = jnp.minimum((x - low) * bins // (high - low), bins - 1)
    slots = Points((bins,), {0: jnp.where(inside, at, bins)}, wrap=False)  # one past the end is dropped
    return slots.write(jnp.zeros(bins, jnp.int64), jnp.ones(x.shape, jnp.int64), "sum").astype(self.dtype)
