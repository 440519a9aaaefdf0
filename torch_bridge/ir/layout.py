"""Where a tensor's elements sit in its storage, and the aten steps that read or write them.

A `Layout` is (size, stride, offset, dtype) over a flat storage, exactly as torch describes views. A storage keeps its value
in the shape it was made with (its *base* layout). Any view of it is read by a short chain of aten ops (`read_steps`) and written by
the inverse chain, so every kind of view, and views of views, share one mechanism.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import torch

aten = torch.ops.aten

Step = tuple[torch._ops.OpOverload, tuple[Any, ...]]
"""An aten op applied to the tensor, and its arguments after the tensor."""


class Layout:
    """An interned (size, stride, offset, dtype, conj, neg); equal layouts are the same object. Make one with `layout()`.

    anchor: the same at offset 0, which is all that an op needs to know that only reads.
    """

    __slots__ = ("__weakref__", "anchor", "conj", "contiguous", "dense", "dtype", "neg", "numel", "offset", "size", "stride")

    def __init__(self, size: tuple[int, ...], stride: tuple[int, ...], offset: int, dtype: torch.dtype, conj: bool, neg: bool):
        self.size = size
        self.stride = stride
        self.offset = offset
        self.dtype = dtype
        self.conj = conj
        self.neg = neg
        self.numel = math.prod(size)
        self.dense = offset == 0 and not conj and not neg and is_dense(size, stride)
        self.contiguous = offset == 0 and stride == contiguous_stride(size)
        self.anchor: Layout = layout(size, stride, 0, dtype, conj, neg) if offset else self

    def __repr__(self) -> str:
        flags = (", conj" if self.conj else "") + (", neg" if self.neg else "")
        return f"Layout({list(self.size)}, stride={list(self.stride)}, offset={self.offset}, {self.dtype}{flags})"

    def __reduce__(self) -> Any:
        return layout, (self.size, self.stride, self.offset, self.dtype, self.conj, self.neg)


_INTERNED: dict[tuple[Any, ...], Layout] = {}
"""Those at offset 0: as many as there are shapes."""
_ELSEWHERE: weakref.WeakValueDictionary[tuple[Any, ...], Layout] = weakref.WeakValueDictionary()
"""The others, as long as somebody has them: slices of data may start anywhere."""
_MAKING = threading.RLock()


def layout(
    size: tuple[int, ...], stride: tuple[int, ...] | None, offset: int, dtype: torch.dtype, conj: bool = False, neg: bool = False
) -> Layout:
    """The layout with these parts (stride None: contiguous)."""
    if stride is None:
        stride = contiguous_stride(size)
    key = (size, stride, offset, dtype, conj, neg)
    found = _ELSEWHERE.get(key) if offset else _INTERNED.get(key)
    if found is None:
        with _MAKING:
            known = _ELSEWHERE if offset else _INTERNED
            found = known.setdefault(key, Layout(*key))
    return found


def of_meta(t: torch.Tensor) -> Layout:
    """The layout of any strided torch tensor, as a view of its storage."""
    return layout(tuple(t.shape), tuple(t.stride()), int(t.storage_offset()), t.dtype)


def base_of_meta(t: torch.Tensor) -> Layout:
    """The base layout for a fresh result with the shape, dtype and (if dense) strides of `t`."""
    size, stride = tuple(t.shape), tuple(t.stride())
    return layout(size, stride if is_dense(size, stride) else None, 0, t.dtype)


def base_of(size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> Layout:
    """The base layout for a fresh tensor of these sizes and strides."""
    found = _BASES.get((size, stride, dtype))
    if found is None:
        found = base_of_meta(torch.empty_strided(size, stride, dtype=dtype, device="meta"))
        if len(_BASES) >= _MOST:
            _BASES.clear()
        _BASES[size, stride, dtype] = found
    return found


_BASES: dict[Any, Layout] = {}
_MOST = 4096


def contiguous_stride(size: tuple[int, ...]) -> tuple[int, ...]:
    stride = [1] * len(size)
    for d in range(len(size) - 2, -1, -1):
        stride[d] = stride[d + 1] * max(size[d + 1], 1)
    return tuple(stride)


def repeats_entries(size: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Whether entries share memory, as `expand` makes them: nothing can be written into them."""
    return any(s == 0 and n > 1 for n, s in zip(size, stride, strict=True))


def reach(of: Layout) -> int:
    """The place in the storage behind the last element."""
    return of.offset + 1 + sum((n - 1) * s for n, s in zip(of.size, of.stride, strict=True) if n)


def in_order(of: Layout) -> bool:
    """Whether the elements lie in the order of the dims, maybe with gaps between them: a contiguous copy lies as they do."""
    strides = [s for n, s in zip(of.size, of.stride, strict=True) if n != 1]
    return not (of.conj or of.neg) and all(strides) and strides == sorted(strides, reverse=True)


def is_dense(size: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """True if the elements fill a block without gaps or overlap, in some order of the dims."""
    expected = 1
    for s, n in sorted((s, n) for n, s in zip(size, stride, strict=True) if n != 1):
        if n == 0:
            return True
        if s != expected:
            return False
        expected *= n
    return True


def read_steps(base: Layout, view: Layout) -> tuple[Step, ...]:
    """The aten ops that turn a value of layout `base` (dense) into the value of `view` of the same storage."""
    return tuple(_plan(base, view))


def _plan(base: Layout, view: Layout) -> list[Step]:
    steps: list[Step] = []
    size, stride = base.size, base.stride
    if view.numel == 0:
        if base.numel or view.dtype != base.dtype:
            flat = (base.numel,) if base.numel else (0,)
            if size != flat:
                steps.append((aten.reshape.default, (flat,)))
            if base.numel:
                steps.append((aten.slice.Tensor, (0, 0, 0, 1)))
            if view.dtype != base.dtype:
                steps.append((aten.view.dtype, (view.dtype,)))
            size = (0,)
        if size != view.size:
            steps.append((aten.reshape.default, (view.size,)))
        return steps
    if base.dtype != view.dtype:
        steps += _to_physical(size, stride)
        size = _reinterpret(steps, base, view.dtype)
        stride = contiguous_stride(size)
    steps += _elements(size, stride, view)
    if view.conj:
        steps.append((aten._conj_physical.default, ()))
    if view.neg:
        steps.append((aten.neg.default, ()))
    return steps


def _to_physical(size: tuple[int, ...], stride: tuple[int, ...]) -> list[Step]:
    """Permute a dense value into the order of its memory."""
    order = tuple(sorted(range(len(size)), key=lambda d: (-stride[d], -size[d])))
    return [] if order == tuple(range(len(size))) else [(aten.permute.default, (order,))]


def _reinterpret(steps: list[Step], base: Layout, dtype: torch.dtype) -> tuple[int, ...]:
    """Append the steps that reread the storage's bytes as `dtype`; returns the new (flat) size."""
    n = base.numel
    steps.append((aten.reshape.default, ((n,),)))
    old, new = base.dtype, dtype
    if old.is_complex and not new.is_complex:
        steps.append((aten.view_as_real.default, ()))
        steps.append((aten.reshape.default, ((2 * n,),)))
        n, old = 2 * n, old.to_real()
    if new.is_complex and not old.is_complex:
        real = new.to_real()
        if old != real:
            steps.append((aten.view.dtype, (real,)))
            n = n * old.itemsize // real.itemsize
        steps.append((aten.reshape.default, ((n // 2, 2),)))
        steps.append((aten.view_as_complex.default, ()))
        return (n // 2,)
    if old != new:
        steps.append((aten.view.dtype, (new,)))
        n = n * old.itemsize // new.itemsize
    return (n,)


def _elements(size: tuple[int, ...], stride: tuple[int, ...], view: Layout) -> list[Step]:
    """Steps from a dense value (size, stride) to the view's elements in the view's shape."""
    if (size, stride, 0) == (view.size, view.stride, view.offset):
        return []
    numel = math.prod(size)
    dims = [d for d in range(len(view.size)) if view.size[d] != 1 and view.stride[d] != 0]
    order = sorted(dims, key=lambda d: -view.stride[d])
    chain = _by_base_dim(size, stride, view, order) or _by_digits(size, stride, numel, view, order)
    if chain is None:
        flat = _to_physical(size, stride)
        if len(size) != 1:
            flat.append((aten.reshape.default, ((numel,),)))
        return [*flat, (aten.as_strided.default, (view.size, view.stride, view.offset))]
    steps, kept = chain
    back = tuple(kept.index(d) for d in dims)
    if back != tuple(range(len(back))):
        steps.append((aten.permute.default, (back,)))
    unit = tuple(1 if d not in dims else view.size[d] for d in range(len(view.size)))
    if unit != tuple(view.size[d] for d in dims):
        steps.append((aten.reshape.default, (unit,)))
    if unit != view.size:
        steps.append((aten.expand.default, (view.size,)))
    return steps


def _by_base_dim(size: tuple[int, ...], stride: tuple[int, ...], view: Layout, order: list[int]) -> tuple[list[Step], list[int]] | None:
    """Slice and select along the dims the value already has, if every view dim steps along one of them."""
    base_dims = sorted((d for d in range(len(size)) if size[d] != 1), key=lambda d: -stride[d])
    along: dict[int, int] = {}
    for v in order:
        fits = [b for b in base_dims if stride[b] <= view.stride[v] and b not in along]
        if not fits or view.stride[v] % stride[fits[0]]:
            return None
        along[fits[0]] = v
    rest = view.offset
    steps: list[Step] = []
    selects: list[Step] = []
    kept: list[int] = []
    where = list(range(len(size)))
    for b in base_dims:
        start, rest = divmod(rest, stride[b])
        if b not in along:
            if start >= size[b]:
                return None
            selects.append((aten.select.int, (b, start)))
            continue
        v = along[b]
        step = view.stride[v] // stride[b]
        end = start + (view.size[v] - 1) * step + 1
        if end > size[b]:
            return None
        if (start, end, step) != (0, size[b], 1):
            steps.append((aten.slice.Tensor, (b, start, end, step)))
    if rest:
        return None
    unit = [(aten.select.int, (b, 0)) for b in range(len(size)) if size[b] == 1]
    for op, (b, start) in sorted([*selects, *unit], key=lambda s: -s[1][0]):
        steps.append((op, (b, start)))
        where.remove(b)
    kept = [along[b] for b in where]
    return steps, kept


def _by_digits(
    size: tuple[int, ...], stride: tuple[int, ...], numel: int, view: Layout, order: list[int]
) -> tuple[list[Step], list[int]] | None:
    """Reshape the memory so that each view dim becomes a dim of its own, then slice; None if strides do not nest."""
    steps = _to_physical(size, stride)
    current = tuple(size[d] for d in steps[0][1][0]) if steps else size
    target: list[int] = []
    slices: list[tuple[int, int, int, int]] = []
    block, rest = numel, view.offset
    for i, v in enumerate(order):
        n, s = view.size[v], view.stride[v]
        if i == len(order) - 1:
            if rest + (n - 1) * s >= block:
                return None
            target.append(block)
            slices.append((i, rest, rest + (n - 1) * s + 1, s))
            break
        if block % s:
            return None
        start, rest = divmod(rest, s)
        if start + n > block // s:
            return None
        inner = sum((view.size[w] - 1) * view.stride[w] for w in order[i + 1 :])
        if rest + inner >= s:
            return None
        target.append(block // s)
        slices.append((i, start, start + n, 1))
        block = s
    if not order:
        target, slices = [numel], [(0, rest, rest + 1, 1)]
    if current != tuple(target):
        steps.append((aten.reshape.default, (tuple(target),)))
    for d, start, end, step in slices:
        if (start, end, step) != (0, target[d], 1):
            steps.append((aten.slice.Tensor, (d, start, end, step)))
    if not order:
        steps.append((aten.reshape.default, ((),)))
    return steps, list(order)


def meta_of(layout: Layout) -> torch.Tensor:
    """A meta tensor with this layout (its storage long enough for it)."""
    if layout.dense:
        return torch.empty_strided(layout.size, layout.stride, dtype=layout.dtype, device="meta")
    flat = torch.empty((reach(layout),), dtype=layout.dtype, device="meta")
    return flat.as_strided(layout.size, layout.stride, layout.offset)


def contiguous_meta(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A contiguous meta tensor, as values of a graph lie."""
    return meta_of(layout(tuple(shape), None, 0, dtype))
