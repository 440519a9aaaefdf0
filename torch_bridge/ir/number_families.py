"""Ops that differ in a Python number alone, as the slices `data[i : i + 32]` of a loop over `i`: they may take it as an input of the program.

A program with `data[0:32]` cannot compute `data[32:64]`. So a step that differs from one before in such numbers alone (`passes.automatic_dynamic`) makes their
families dynamic: from then on one program serves all numbers. A number that never changes stays a constant, which XLA knows more about. torch.compile calls
that "automatic dynamic", for shapes. Numbers of arithmetic (`x * k`, a learning rate) are inputs from the start (`Lift`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from torch_bridge.ir.entry import Entry, Lift, Slot
from torch_bridge.ir.layout import Layout

aten = torch.ops.aten


class NumberFamily:
    """Entries that differ in numbers alone, for which one entry can stand.

    dynamic: whether the numbers are inputs of programs from now on. entry: the one that then stands for all; its lifted numbers are `Entry.numbers` of those.
    """

    __slots__ = ("dynamic", "entry")

    def __init__(self, entry: Entry):
        self.dynamic = False
        self.entry = entry
        entry.family = self


_Found = tuple[tuple[Any, ...], torch._ops.OpOverload, tuple[Any, ...]] | None
"""The numbers of a call, and the op with its arguments in which they are inputs. None if this call's are constants for good."""
_Form = Callable[[Entry], _Found]
_FIRST = Lift(0, int)


class _Slice(NamedTuple):
    """A slice. at: the places of its positions in a dim, which is the argument before them; op: what takes the first one as an input."""

    at: tuple[int, ...]
    op: torch._ops.OpOverload

    def found(self, entry: Entry, inputs: Sequence[Layout]) -> _Found:
        """A slice that starts anywhere, and is as long as this one; none for those that have gaps."""
        args = list(entry.args)
        if len(args) <= self.at[-1] or not all(type(args[k]) is int for k in self.at):
            return None
        shape = args[1] if entry.op in _GRADIENTS else inputs[0].size
        length = shape[args[self.at[0] - 1]] if shape else 1
        start, *ends = [args[k] + (length if args[k] < 0 else 0) for k in self.at]  # `x[-k]` counts from the end
        before = tuple(args[: self.at[0]])
        if not ends:
            return ((start,), self.op, (*before, _FIRST, *args[self.at[0] + 1 :])) if start >= 0 else None
        end = min(ends[0], length)
        if not 0 <= start < end or [*args[self.at[1] + 1 :], 1][0] != 1:
            return None
        if self.op is aten.narrow_copy.default:
            return (start,), self.op, (*before, _FIRST, end - start)
        return (start, end), self.op, (*before, _FIRST, Lift(1, int), 1)


def _numbers(*places: int, fits: Callable[..., bool] = lambda *numbers: True) -> _Form:
    """Arguments that the op itself may have as inputs. fits: whether a program with other numbers computes these, too."""

    def form(entry: Entry) -> _Found:
        args = list(entry.args)
        found = tuple(args[k] for k in places if k < len(args))
        if len(found) < len(places) or not all(type(v) in (int, float) for v in found) or not fits(*found):
            return None
        for i, k in enumerate(places):
            args[k] = Lift(i, type(args[k]))
        return found, entry.op, tuple(args)

    return form


def _roll(entry: Entry) -> _Found:
    x, shifts, *dims = entry.args
    return (
        (tuple(shifts), entry.op, (x, [Lift(i, int) for i in range(len(shifts))], *dims)) if all(type(s) is int for s in shifts) else None
    )


def _arange(entry: Entry) -> _Found:
    start, _, step = [*entry.args, 1][:3]
    if type(start) is not int or type(step) is not int or entry.outs[0] is None or not entry.outs[0].numel:
        return None
    return (start, step), torch.ops.torch_bridge.ramp.default, (_FIRST, Lift(1, int), entry.outs[0].numel, entry.outs[0].dtype)


def _is_chance(p: float) -> bool:
    """A probability for which one comparison of 32 bits does."""
    return 2.0**-16 < p < 1 - 2.0**-16


_SLICES = {
    aten.slice.Tensor: _Slice((2, 3), aten.narrow_copy.default),
    aten.slice_copy.Tensor: _Slice((2, 3), aten.narrow_copy.default),
    aten.slice_scatter.default: _Slice((3, 4), aten.slice_scatter.default),
    aten.slice_backward.default: _Slice((3, 4), aten.slice_backward.default),
    aten.narrow_copy.default: _Slice((2,), aten.narrow_copy.default),
    aten.select.int: _Slice((2,), aten.select_copy.int),
    aten.select_copy.int: _Slice((2,), aten.select_copy.int),
    aten.select_scatter.default: _Slice((3,), aten.select_scatter.default),
    aten.select_backward.default: _Slice((3,), aten.select_backward.default),
}
_OTHERS: dict[torch._ops.OpOverload, _Form] = {
    aten.arange.start: _arange,
    aten.arange.start_step: _arange,
    aten.roll.default: _roll,
    aten.tril.default: _numbers(1),
    aten.triu.default: _numbers(1),
    aten.uniform.default: _numbers(1, 2, fits=lambda low, high: low < high and math.isfinite(high - low)),
    aten.normal_functional.default: _numbers(1, 2),
    aten.normal.float_float: _numbers(0, 1),
    aten.bernoulli.p: _numbers(1, fits=_is_chance),
    aten.native_dropout.default: _numbers(1, fits=_is_chance),
    aten.native_dropout_backward.default: _numbers(2),
    aten._native_batch_norm_legit_functional.default: _numbers(6),
    aten._batch_norm_with_update_functional.default: _numbers(5),
}
SLICES = frozenset(_SLICES)
"""Those that read or write a part of a tensor."""
_GRADIENTS = (aten.slice_backward.default, aten.select_backward.default)
"""Those whose dim is one of the result, whose size is the second argument."""
_FAMILIES: dict[tuple[Any, ...], NumberFamily] = {}


def join(entry: Entry, inputs: Sequence[Layout]) -> None:
    """Note the family of an entry for an op on tensors of these layouts, if it has one."""
    part, form = _SLICES.get(entry.op), _OTHERS.get(entry.op)
    found = part.found(entry, inputs) if part is not None else form(entry) if form is not None else None
    if found is None:
        return
    entry.numbers, op, args = found
    kwargs = {} if op.namespace == "torch_bridge" else entry.kwargs
    key = (entry.op, tuple(inputs), _hashable(args), _hashable(kwargs), entry.outs, tuple(entry.casts), entry.rng)
    family = _FAMILIES.get(key)
    if family is None:
        dynamic = Entry(op, args, kwargs, entry.outs, entry.casts, entry.rng)
        dynamic.paths = entry.paths
        family = _FAMILIES[key] = NumberFamily(dynamic)
    entry.family = family


def _hashable(x: Any) -> Any:
    if isinstance(x, dict):
        return tuple((name, _hashable(y)) for name, y in x.items())
    if isinstance(x, (list, tuple)):
        return tuple(map(_hashable, x))
    return (x.index, x.kind) if isinstance(x, Lift) else ("slot", x.index) if isinstance(x, Slot) else (type(x), x)


def moves(entry: Entry) -> bool:
    """Whether the entry of a dynamic family is recorded in place of this one, which may be forgotten."""
    return entry.family is not None and entry.family.dynamic and entry.numbers is not None


def alike(entry: Entry) -> Any:
    """What entries of one family have in common; the entry itself if it is in none."""
    return entry if entry.family is None else (entry.family, entry.axes)


def as_recorded_now(nodes: Sequence[Any]) -> tuple[list[Any], dict[int, tuple[Any, ...]]]:
    """Nodes as they would be recorded from now on, and the numbers of those that are others by that, by place."""
    found = list(nodes)
    numbers: dict[int, tuple[Any, ...]] = {}
    for i, node in enumerate(nodes):
        entry, own = recorded(node[0])
        if own:
            found[i] = (entry.varied(node[0].axes) if node[0].axes else entry, *node[1:])
            numbers[i] = own
    return found, numbers


def recorded(entry: Entry) -> tuple[Entry, tuple[Any, ...]]:
    """An entry as it is recorded from now on, and its numbers."""
    family = entry.family
    return (entry, ()) if family is None or not family.dynamic or entry.numbers is None else (family.entry, entry.numbers)
