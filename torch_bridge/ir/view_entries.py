"""Entries that read and write views of a storage, and those that fill a tensor with one number: made once for each pair of layouts."""

from __future__ import annotations

from typing import Any

import torch

from torch_bridge.ir import number_families
from torch_bridge.ir.bounded import Bounded
from torch_bridge.ir.entry import Entry, Lift, Slot
from torch_bridge.ir.layout import Layout, Step, layout, read_steps, repeats_entries

aten = torch.ops.aten


class WriteChain:
    """Entries that write through a view: `reads` gives the intermediate values, `writes` pairs an entry with the one it scatters into."""

    __slots__ = ("reads", "scatters", "writes")

    def __init__(self, reads: list[Entry], writes: list[tuple[Entry, int | None]]):
        self.scatters = any(into is not None for _, into in writes)
        self.reads = reads if self.scatters else []
        self.writes = writes


_STEP_ENTRIES: Bounded[tuple[Any, ...], Entry] = Bounded(number_families.moves)
_READS: Bounded[tuple[Layout, Layout], tuple[Entry, ...]] = Bounded(lambda entries: any(map(number_families.moves, entries)))
_WRITES: Bounded[tuple[Layout, Layout], WriteChain] = Bounded(lambda chain: any(number_families.moves(entry) for entry, _ in chain.writes))
_SCATTERS = {
    aten.slice.Tensor: aten.slice_scatter.default,
    aten.select.int: aten.select_scatter.default,
    aten.as_strided.default: aten.as_strided_scatter.default,
}


def step_entry(op: torch._ops.OpOverload, inputs: tuple[Layout, ...], args: tuple[Any, ...], **kwargs: Any) -> Entry:
    """The entry for an op on tensors of these layouts and constant arguments after them."""
    key = (op, inputs, args, *kwargs.items())
    entry = _STEP_ENTRIES.get(key)
    if entry is None:
        metas = [torch.empty(i.size, dtype=i.dtype, device="meta") for i in inputs]
        out = op(*metas, *args, **kwargs)
        slots = tuple(Slot(i) for i in range(len(inputs)))
        entry = Entry(op, (*slots, *args), kwargs, (layout(tuple(out.shape), None, 0, out.dtype),))
        if not kwargs:
            number_families.join(entry, inputs)
        _STEP_ENTRIES.add(key, entry)
    return entry


def flat(of: Layout) -> Layout:
    """The base layout of a value with this shape and dtype."""
    return layout(of.size, None, 0, of.dtype)


def full_entry(size: tuple[int, ...], dtype: torch.dtype, kind: type) -> Entry:
    """`aten.full` with its number as an input of the program."""
    key = (aten.full.default, size, dtype, kind)
    entry = _STEP_ENTRIES.get(key)
    if entry is None:
        entry = Entry(aten.full.default, (size, Lift(0, kind)), {"dtype": dtype}, (layout(size, None, 0, dtype),))
        _STEP_ENTRIES.add(key, entry)
    return entry


def constant_entry(size: tuple[int, ...], value: Any, dtype: torch.dtype) -> Entry:
    """`aten.full` with its number as part of the program."""
    key = (aten.full.default, size, dtype, repr(value))
    entry = _STEP_ENTRIES.get(key)
    if entry is None:
        aten.full.default((1,), value, dtype=dtype)  # of one element: the shape is known
        entry = Entry(aten.full.default, (size, value), {"dtype": dtype}, (layout(size, None, 0, dtype),))
        _STEP_ENTRIES.add(key, entry)
    return entry


def read_entries(base: Layout, view: Layout) -> tuple[Entry, ...]:
    """Entries that read `view` from a value in `base` layout."""
    found = _READS.get((base, view))
    if found is None:
        entries = []
        at = flat(base)
        for op, args in read_steps(base, view):
            entry = step_entry(op, (at,), args)
            entries.append(entry)
            assert entry.outs[0] is not None
            at = entry.outs[0]
        found = _READS.add((base, view), tuple(entries))
    return found


def moves(base: Layout, view: Layout) -> bool:
    """Whether a view is a slice that starts elsewhere in other steps."""
    return any(map(number_families.moves, read_entries(base, view)))


def write_entries(base: Layout, view: Layout) -> WriteChain:
    """Entries that write a value of `view` into a value in `base` layout, leaving the rest."""
    found = _WRITES.get((base, view))
    if found is None:
        found = _WRITES.add((base, view), _build_write(base, view))
    return found


def _build_write(base: Layout, view: Layout) -> WriteChain:
    if repeats_entries(view.size, view.stride):
        raise RuntimeError(
            "unsupported operation: more than one element of the written-to tensor refers to a single memory location. "
            f"The tensor of shape {list(view.size)} has strides {list(view.stride)}, as expand() makes them; clone() it before writing to it."
        )
    steps = read_steps(base, view)
    reads = read_entries(base, view)
    shapes = [flat(base), *(e.outs[0] for e in reads)]
    writes: list[tuple[Entry, int | None]] = []
    last_scatter = 0
    for k in range(len(steps) - 1, -1, -1):
        op, args = steps[k]
        before, after = shapes[k], shapes[k + 1]
        assert before is not None and after is not None
        scatter = _SCATTERS.get(op)
        if op is aten.select.int and before.size[args[0]] == 1:  # all there is: nothing of the old value stays
            writes.append((step_entry(aten.reshape.default, (after,), (before.size,)), None))
            continue
        if scatter is not None:
            writes.append((step_entry(scatter, (before, after), args), k))
            last_scatter = max(last_scatter, k)
            continue
        inverse, inverse_args = _inverse(op, args, before, after)
        writes.append((step_entry(inverse, (after,), inverse_args), None))
    return WriteChain(list(reads[:last_scatter]), writes)


def _inverse(op: torch._ops.OpOverload, args: tuple[Any, ...], before: Layout, after: Layout) -> Step:
    if op is aten.reshape.default:
        return aten.reshape.default, (before.size,)
    if op is aten.permute.default:
        return aten.permute.default, (tuple(args[0].index(d) for d in range(len(args[0]))),)
    if op is aten.view.dtype:
        return aten.view.dtype, (before.dtype,)
    if op is aten.view_as_real.default:
        return aten.view_as_complex.default, ()
    if op is aten.view_as_complex.default:
        return aten.view_as_real.default, ()
    return op, ()  # conj and neg are their own inverses
