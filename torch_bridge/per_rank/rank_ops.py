"""Each rank's own number inside the graph: torch functions that meet a `rank_numbers.RankInt`, and slices whose start differs by rank."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from torch_bridge.collectives import collective_ops, rank_slices  # noqa: F401  # its ops
from torch_bridge.ir.segment import Segment, Storage
from torch_bridge.ir.view_entries import flat, step_entry
from torch_bridge.mesh import rank_numbers, world
from torch_bridge.per_rank import rank_functions
from torch_bridge.recorder import sharded
from torch_bridge.recorder.tensor import XLATensor, make
from torch_bridge.runtime import backend

aten = torch.ops.aten

ops = torch.ops.torch_bridge


# -- recording ------------------------------------------------------------------------------------


def as_tensor(number: object) -> torch.Tensor:
    """A 0-d xla tensor with each rank's own value of a number that differs by rank."""
    if rank_numbers.is_item(number):
        first = world.current().hosted[0]
        return sharded.from_ranks(lambda r: torch.tensor(rank_numbers.own(number, r - first)))
    values = rank_numbers.values_of(number)
    assert values is not None
    if isinstance(number, torch.SymFloat):
        return collective_ops.emit(ops.rank_float.default, (), (tuple(float(v) for v in values),))
    out = collective_ops.emit(ops.rank_int.default, (), (tuple(int(v) for v in values),))
    return out.bool() if isinstance(number, torch.SymBool) else out


_PIECES = {"slice", "split", "chunk", "unbind", "tensor_split"}


def call(func: Any, args: Any, kwargs: Any, original: Any = None) -> Any:
    """A torch function that was given a number for each rank (`RankInt.__torch_function__`). original: what to call for one rank, if not the function."""
    name = getattr(func, "__name__", "")
    on_xla = any(isinstance(x, XLATensor) for x in tree_leaves((args, kwargs)))
    if not on_xla:
        return rank_functions.compute(original or func, args, kwargs)
    func = original or func
    own_rule: Any = _OWN_RULES.get(name)
    if own_rule is not None:
        return own_rule(*args, **kwargs)
    places: list[Any] = [_convert(name, i, a) for i, a in enumerate(args)]
    return func(*places, **{k: _convert(name, k, a) for k, a in kwargs.items()})


def _convert(name: str, place: int | str, value: Any) -> Any:
    """A tensor where the function takes one at this place; else the bare number, which the recorder then knows how to use or refuses.

    A tensor where torch wants a size would be read as the first rank's number.
    """
    if rank_numbers.is_ranked(value) and (name.startswith("__") or name in _TAKES_TENSORS or _takes_tensor(name, place)):
        return as_tensor(value)
    return tree_map(symbolic, value)


_TAKES_TENSORS = {"divide_", "multiply_", "where"}


@functools.cache
def _takes_tensor(name: str, place: int | str) -> bool:
    """Whether an overload of the function takes a tensor at a position or for a keyword."""
    packet = getattr(aten, name, None)
    if packet is None or name in _PIECES:
        return False
    for overload in packet.overloads():
        arguments = getattr(packet, overload)._schema.arguments
        found = [a for i, a in enumerate(arguments) if place in (i, a.name)]
        if found and str(found[0].type) in ("Tensor", "Optional[Tensor]"):
            return True
    return False


def symbolic(x: Any) -> Any:
    """The number without its class, which torch passes on to the recorder as it is."""
    if not rank_numbers.is_ranked(x):
        return x
    node = (
        x.node if rank_numbers.values_of(x) is not None else rank_numbers.RankNode(tuple(rank_numbers.per_rank(x)), world.current().hosted)
    )
    return {int: torch.SymInt, float: torch.SymFloat, bool: torch.SymBool}[node.pytype](node)


def _lists_as_tensors(x: torch.Tensor, index: object) -> tuple[Any, ...] | None:
    """The items of an index whose only numbers of ranks are in lists (`x[[rank, rank + 2]]`), these as tensors. None for any other index."""
    items = index if isinstance(index, tuple) else (index,)
    if any(rank_numbers.is_ranked(i) for i in items):
        return None
    return tuple(
        torch.tensor(i, device=x.device) if isinstance(i, list) and any(rank_numbers.is_ranked(n) for n in tree_leaves(i)) else i
        for i in items
    )


def _getitem(x: torch.Tensor, index: object) -> torch.Tensor:
    """`x[rank]`, also among other indices: a slice of length one at each rank's own place, without that dim. `x[[rank, rank + 2]]`: these rows of each."""
    lists = _lists_as_tensors(x, index)
    if lists is not None:
        return x[lists]
    items = _agreed(index if isinstance(index, tuple) else (index,))
    if any(isinstance(i, (torch.Tensor, list, bool)) for i in items):
        return _own_places(x, items)[_without_numbers(x, items)]
    taken = sum(i is not None and i is not Ellipsis for i in items)
    dropped: list[int] = []
    made: list[Any] = []
    at = 0
    for i in items:
        if i is Ellipsis:
            at += x.dim() - taken
            made.append(i)
        elif rank_numbers.is_ranked(i):
            dropped.append(at)
            size = _size_at(x, items, i)
            at_least = [k + size if k < 0 else k for k in rank_numbers.per_rank(i)]
            if not all(0 <= k < size for k in at_least):
                raise IndexError(f"index {rank_numbers.per_rank(i)} (one for each rank) is out of range for a dimension of size {size}")
            start = world.current().table(at_least.__getitem__)
            made.append(slice(start, start + 1))
            at += 1
        else:
            at += not (isinstance(i, int) and i is not None)
            made.append(i)
    out = x[tuple(made)]
    for dim in reversed(dropped):
        out = out.squeeze(dim)
    return out


def _agreed(items: Sequence[Any]) -> list[Any]:
    """Items of an index, with truths that all ranks share as plain ones. Raises for others: `x[rank == 0]` has one row for a rank and none for the rest."""
    made = [bool(i) if isinstance(i, bool) and len(set(rank_numbers.per_rank(i))) == 1 else i for i in items]
    truth = next((i for i in made if isinstance(i, bool) and rank_numbers.is_ranked(i)), None)
    if truth is not None:
        raise rank_numbers.PlainNumberNeeded(
            f"a truth that differs by rank as an index ({str(rank_numbers.per_rank(truth)[:4]).strip('[]')} for rank 0, 1, ...) gives ranks different shapes: "
            "use torch.where(truth, x, other) or x * truth, or start one process per rank with torchrun"
        )
    return made


def _own_places(x: torch.Tensor, items: Sequence[Any]) -> torch.Tensor:
    """x at each rank's places alone, as torch takes numbers among index tensors first."""
    first: list[Any] = []
    for i in items:
        if isinstance(i, (list, torch.Tensor)):
            i = torch.as_tensor(i)
            first += [slice(None)] * (i.dim() if i.dtype in (torch.bool, torch.uint8) else 1)
        elif rank_numbers.is_ranked(i) or i is Ellipsis:
            first.append(i)
        elif i is not None and not isinstance(i, bool):
            first.append(slice(None))
    return _getitem(x, tuple(first))


def _without_numbers(x: torch.Tensor, items: Sequence[Any]) -> tuple[Any, ...]:
    """The rest of an index."""
    return tuple(torch.tensor(i, device=x.device) if isinstance(i, list) else i for i in items if not rank_numbers.is_ranked(i))


def _size_at(x: torch.Tensor, items: list[Any], item: Any) -> int:
    """The size of the dimension that an index is for."""
    place = next(k for k, i in enumerate(items) if i is item)
    if Ellipsis in [i for i in items[:place] if not rank_numbers.is_ranked(i)]:
        return x.shape[x.dim() - sum(i is not None for i in items[place:])]
    return x.shape[sum(i is not None for i in items[:place])]


def _setitem(x: torch.Tensor, index: Any, value: Any) -> None:
    """`x[rank] = value`, also among other indices: each rank writes at its own place."""
    lists = _lists_as_tensors(x, index)
    if lists is not None:
        x[lists] = _as_values(value, x)
        return
    if isinstance(index, bool):
        x.copy_(torch.where(as_tensor(index), _fitting(_as_values(value, x), x), x))
        return
    items = _agreed(index if isinstance(index, tuple) else (index,))
    if any(isinstance(i, (torch.Tensor, list, bool)) for i in items):
        _own_places(x, items)[_without_numbers(x, items)] = _as_values(value, x)
        return
    place = _getitem(x, index)
    if not isinstance(value, torch.Tensor):
        place.fill_(value)
        return
    place.copy_(_fitting(value, place))


def _as_values(value: Any, x: torch.Tensor) -> Any:
    """A number that differs by rank as a tensor of x's dtype; anything else as it is."""
    return as_tensor(value).to(x.dtype) if rank_numbers.is_ranked(value) else value


def _fitting(value: Any, place: torch.Tensor) -> Any:
    """Without leading dims of one element, which an assignment passes over."""
    while isinstance(value, torch.Tensor) and value.dim() > place.dim() and value.shape[0] == 1:
        value = value[0]
    return value


def _select_of(x: torch.Tensor, dim: int, index: Any) -> torch.Tensor:
    dim = dim % x.dim()
    return _getitem(x, (*[slice(None)] * dim, index))


_OWN_RULES: dict[str, Any] = {"__getitem__": _getitem, "__setitem__": _setitem, "select": _select_of}


def _narrow(x: torch.Tensor, dim: int, start: Any, length: Any) -> torch.Tensor:
    if rank_numbers.values_of(length) is not None:
        return x[(*[slice(None)] * (dim % x.dim()), slice(start, start + length))]  # which says that all ranks need the same shape
    begins = [s + x.shape[dim] if s < 0 else s for s in rank_numbers.per_rank(start)]
    if not all(0 <= s <= x.shape[dim] - length for s in begins):
        raise RuntimeError(f"narrow(dim={dim}, start={begins}, length={length}) is out of range for dimension of size {x.shape[dim]}")
    first = world.current().table(begins.__getitem__)
    return aten.slice.Tensor(x, dim, symbolic(first), symbolic(first + length))


_OWN_RULES["narrow"] = _narrow


def _roll(x: torch.Tensor, shifts: Any, dims: Any = None) -> torch.Tensor:
    """`x.roll(rank, dim)`: each rank takes its own places."""
    if dims is None or (isinstance(dims, (list, tuple)) and not dims):
        return _roll(x.reshape(-1), shifts, 0).reshape(x.shape)
    pairs = (
        zip(shifts, dims, strict=True)
        if isinstance(shifts, (list, tuple))
        else [(shifts, dims[0] if isinstance(dims, (list, tuple)) else dims)]
    )
    for shift, dim in pairs:
        places = torch.arange(x.shape[dim], device=x.device) - shift
        x = x.index_select(dim, places % x.shape[dim])
    return x


def _new_tensor(x: torch.Tensor, data: Any, **kwargs: Any) -> torch.Tensor:
    return torch.tensor(data, **{"dtype": x.dtype, "device": x.device, **kwargs})


_OWN_RULES["roll"] = _roll
_OWN_RULES["new_tensor"] = _new_tensor


def record(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Record a call that has numbers for each rank among its arguments."""
    from torch_bridge.recorder import dispatch

    backend.ensure()

    rule = _RULES.get(func)
    if rule is not None:
        return rule(*args, **kwargs)
    info = dispatch.info(func)
    for taken, a in (*zip(info.scalar_at, args, strict=False), *((info.scalar.get(name), a) for name, a in kwargs.items())):
        number = next((x for x in tree_leaves(a) if rank_numbers.is_ranked(x)), None)
        if number is not None and (not taken or isinstance(a, (list, tuple))):
            raise rank_numbers.refuse(rank_numbers.per_rank(number))
    args, kwargs = _without_alpha(*tree_map(lambda x: as_tensor(x) if rank_numbers.is_ranked(x) else x, (args, kwargs)))
    tensor_form = _tensor_form(func, args, kwargs)
    return dispatch.dispatch(tensor_form, args, kwargs)


def filled_like(x: torch.Tensor, size: Sequence[Any], number: Any, dtype: Any) -> torch.Tensor:
    """A new tensor full of each rank's own number (`torch.full_like`, `x.new_full`)."""
    return torch.zeros(tuple(size), dtype=dtype or x.dtype, device=x.device).copy_(as_tensor(number))


def _without_alpha(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """`add(x, y, alpha=number)` with a tensor for a number: the product takes y's place."""
    alpha = kwargs.get("alpha")
    if not isinstance(alpha, torch.Tensor):
        return args, kwargs
    x, other = args
    return (x, (other * alpha).to(getattr(other, "dtype", x.dtype))), {k: v for k, v in kwargs.items() if k != "alpha"}


def _tensor_form(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The overload that takes tensors where this one takes numbers."""
    packet = getattr(aten, func._schema.name.removeprefix("aten::"))
    by_name = [a for a in kwargs.values() if isinstance(a, torch.Tensor)]
    for name in packet.overloads() if not by_name else ():
        other = getattr(packet, name)
        arguments = other._schema.arguments
        fits = len(arguments) >= len(args) and all(
            ("Tensor" in str(arguments[i].type)) == isinstance(a, torch.Tensor) for i, a in enumerate(args)
        )
        if fits and not any(a.is_out for a in arguments):
            return other
    raise NotImplementedError(
        f"{func} with a number that differs by rank: make it a tensor first (torch.zeros((), device='xla') + rank) and use an operator that takes tensors"
    )


def _slice(x: XLATensor, dim: int = 0, start: Any = None, end: Any = None, step: Any = 1) -> Any:
    if step != 1:
        raise NotImplementedError("a slice whose start differs by rank must have step 1: use index_select with (torch.arange(...) + rank)")
    dim = dim % x.dim()
    size = x.shape[dim]
    starts = [_clamp(0 if s is None else s, size) for s in rank_numbers.per_rank(start)]
    ends = [_clamp(size if e is None else e, size) for e in rank_numbers.per_rank(end)]
    lengths = {max(0, e - s) for s, e in zip(starts, ends, strict=True)}
    if len(lengths) != 1:
        raise RuntimeError(
            f"a slice of dim {dim} (size {size}) would have {sorted(lengths)} elements on different ranks (starts {starts}, ends {ends}): "
            "all ranks need the same shape; pad the dimension"
        )
    return _emit_slice(x, dim, starts, lengths.pop())


def _clamp(index: int, size: int) -> int:
    return min(max(index + size if index < 0 else index, 0), size)


def _emit_slice(x: XLATensor, dim: int, starts: Sequence[int], length: int) -> Any:
    out = collective_ops.emit(ops.rank_slice.default, (x,), (dim, tuple(starts), length))
    _Link(x, out, dim, tuple(starts), length)
    return out


_TIDY = 32
"""After how many slices of a tensor those that are gone are forgotten."""


class _Link:
    """Keeps a slice and the tensor it was taken from alike, as aliases are: a write to one side is recorded on the other."""

    def __init__(self, whole: XLATensor, part: XLATensor, dim: int, starts: tuple[int, ...], length: int):
        self.whole = weakref.ref(whole._storage)
        self.layout = whole._layout
        self.part = weakref.ref(part._storage)
        self.dim, self.starts, self.length = dim, starts, length
        for storage in (whole._storage, part._storage):
            storage.describe()
            links = storage.facts.links  # type: ignore[union-attr]
            if len(links) % _TIDY == _TIDY - 1:  # a tensor that is only read, in every step, would collect them
                links[:] = [link for link in links if link.alive()]
            links.append(self)
        part._storage.facts.keep = whole._storage  # type: ignore[union-attr]  # as a view keeps its base

    def alive(self) -> bool:
        """Whether both sides still exist."""
        return self.whole() is not None and self.part() is not None

    def follow(self, segment: Segment, written: Storage) -> None:
        """One side has been written: write the other."""
        whole, part = self.whole(), self.part()
        if whole is None or part is None:
            if whole is not None and whole.facts is not None and self in whole.facts.links:
                whole.facts.links.remove(self)
            return
        source = make(self.layout, whole)
        piece = make(part.layout, part)
        if written is whole:
            entry = step_entry(ops.rank_slice.default, (flat(self.layout),), (self.dim, self.starts, self.length))
            segment.write(part, segment.emit(entry, (segment.read(whole, self.layout),)))
            segment.follow(part, self)
            return
        entry = step_entry(ops.rank_slice_write.default, (flat(source._layout), flat(piece._layout)), (self.dim, self.starts))
        vid = segment.emit(entry, (segment.read(whole, self.layout), segment.read(part, part.layout)))
        befores = whole.facts.links  # type: ignore[union-attr]
        whole.facts.links = []  # type: ignore[union-attr]
        segment.write_view(whole, self.layout, vid)
        whole.facts.links = befores  # type: ignore[union-attr]
        segment.follow(whole, self)


def _select(x: XLATensor, dim: int, index: Any) -> Any:
    dim = dim % x.dim()
    size = x.shape[dim]
    at = rank_numbers.per_rank(index)
    if not all(-size <= i < size for i in at):
        raise IndexError(f"index {at} (one for each rank) is out of range for dimension {dim} with size {size}")
    return _emit_slice(x, dim, [i % size for i in at], 1).squeeze(dim)


def _slice_backward(grad: XLATensor, size: Sequence[Any], dim: int, start: Any, end: Any, step: int = 1) -> Any:
    dim = dim % len(size)
    starts = tuple(_clamp(s, size[dim]) for s in rank_numbers.per_rank(start))
    return collective_ops.emit(ops.rank_slice_backward.default, (grad,), (tuple(int(n) for n in size), dim, starts))


def _select_backward(grad: XLATensor, size: Sequence[Any], dim: int, index: Any) -> Any:
    dim = dim % len(size)
    at = [i % size[dim] for i in rank_numbers.per_rank(index)]
    return collective_ops.emit(ops.rank_slice_backward.default, (grad.unsqueeze(dim),), (tuple(int(n) for n in size), dim, tuple(at)))


_RULES: dict[Any, Any] = {
    aten.slice.Tensor: _slice,
    aten.select.int: _select,
    aten.slice_backward.default: _slice_backward,
    aten.select_backward.default: _select_backward,
}
