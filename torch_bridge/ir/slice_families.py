"""Slices that differ in their start alone, as `data[i : i + 32]` in a loop over `i`: a family may take its start as an input of the program.

A program with `data[0:32]` cannot compute `data[32:64]`. So a step that differs from one before in the starts of slices alone (`passes.dynamic_slices`) makes
their families dynamic: from then on the same program serves all starts. Slices whose start never changes stay as they are, which XLA knows more about.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from torch_bridge.ir.entry import Entry, Lift, Slot
from torch_bridge.ir.layout import Layout

aten = torch.ops.aten


class SliceFamily:
    """Entries that read or write a part of a tensor and differ in where it starts.

    dynamic: whether their start is an input of programs from now on. entry: the one entry that then stands for all; its lifted numbers are `Entry.start`.
    """

    __slots__ = ("dynamic", "entry")

    def __init__(self, entry: Entry):
        self.dynamic = False
        self.entry = entry
        entry.family = self


class _Form(NamedTuple):
    """How an op takes a start. at: the places of its numbers among the arguments after the tensors. op, args: the same with the start as an input."""

    at: tuple[int, ...]
    op: torch._ops.OpOverload
    args: Callable[..., tuple[Any, ...]]


def _ends(args: Sequence[Any], at: int) -> bool:
    """Whether a part has a start and an end of its own, and no gaps: what is lifted starts anywhere, and is as long as it was."""
    start, end, step = [*args[at : at + 3], 1][:3]
    return bool(0 <= start < end and step == 1)


_START, _END = Lift(0, int), Lift(1, int)
_SLICE = _Form((1, 2), aten.narrow_copy.default, lambda dim, start, end, step=1: (dim, _START, end - start))
_SELECT = _Form((1,), aten.select_copy.int, lambda dim, index: (dim, _START))
_FORMS = {
    aten.slice.Tensor: _SLICE,
    aten.slice_copy.Tensor: _SLICE,
    aten.select.int: _SELECT,
    aten.select_copy.int: _SELECT,
    aten.narrow_copy.default: _Form((1,), aten.narrow_copy.default, lambda dim, start, length: (dim, _START, length)),
    aten.slice_scatter.default: _Form((1, 2), aten.slice_scatter.default, lambda dim, start, end, step=1: (dim, _START, _END, 1)),
    aten.select_scatter.default: _Form((1,), aten.select_scatter.default, lambda dim, index: (dim, _START)),
    aten.slice_backward.default: _Form(
        (2, 3), aten.slice_backward.default, lambda size, dim, start, end, step: (size, dim, _START, _END, 1)
    ),
    aten.select_backward.default: _Form((2,), aten.select_backward.default, lambda size, dim, index: (size, dim, _START)),
}
_FAMILIES: dict[tuple[Any, ...], SliceFamily] = {}


def join(entry: Entry, inputs: Sequence[Layout], args: Sequence[Any]) -> None:
    """Note the family of an entry for an op on tensors of these layouts and arguments after them, if it is a slice."""
    form = _FORMS.get(entry.op)
    if form is None or len(args) <= form.at[-1] or not all(type(args[k]) is int and args[k] >= 0 for k in form.at):
        return
    if len(form.at) == 2 and not _ends(args, form.at[0]):
        return
    start = tuple(args[k] for k in form.at)
    others = tuple(tuple(x) if isinstance(x, list) else x for k, x in enumerate(args) if k not in form.at)
    key = (entry.op, tuple(inputs), others, start[-1] - start[0], entry.outs, tuple(entry.casts))
    family = _FAMILIES.get(key)
    if family is None:
        slots = tuple(Slot(k) for k in range(len(inputs)))
        dynamic = Entry(form.op, (*slots, *form.args(*args)), {}, entry.outs, entry.casts)
        dynamic.paths = entry.paths
        family = _FAMILIES[key] = SliceFamily(dynamic)
    entry.family = family
    entry.start = start[:1] if form.op is aten.narrow_copy.default else start  # which takes a length


def alike(entry: Entry) -> Any:
    """What entries of one family have in common; the entry itself if it is in none."""
    return entry.family or entry


def recorded(entry: Entry) -> tuple[Entry, tuple[int, ...]]:
    """An entry as it is recorded from now on, and its numbers."""
    family = entry.family
    return (entry, ()) if family is None or not family.dynamic else (family.entry, entry.start)
