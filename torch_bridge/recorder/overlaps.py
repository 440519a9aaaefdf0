"""In-place ops whose output shares memory with an input: torch refuses what depends on the order of its writes, and so do we.

Which ops refuse which overlaps is torch's to say: where arguments share a storage, its CPU kernel is asked, once for each signature, on tensors of zeros that
share memory in the same way. An op on lists goes through them in turn: it is recorded so where one entry writes what another one uses. Memory that expand()
repeats is refused where a view is written (`segment`).
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map

from torch_bridge.ir.bounded import Bounded
from torch_bridge.ir.layout import Layout, is_dense, reach
from torch_bridge.recorder.schema import info
from torch_bridge.recorder.tensor import XLATensor

MOST_BYTES = 1 << 24
"""Bytes that all arguments lie in up to which torch is asked; above, what holds for nearly all ops is applied: an input that is partly the output is refused.
"""

_MESSAGE = (
    "unsupported operation: some elements of the input tensor and the written-to tensor refer to a single memory location. "
    "Please clone() the tensor before performing the operation."
)
_REFUSED: Bounded[Any, str] = Bounded(lambda refused: True)
_ALIGNED = 16
"""Bytes: of the largest elements."""


def check(
    func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any] | None, tensors: list[XLATensor], key: tuple[Any, ...]
) -> bool:
    """RuntimeError if torch's own op refuses to write where these arguments (`tensors`, of the signature `key`) share memory. Whether some share a storage."""
    places: dict[int, int] = {}
    sharing = tuple(places.setdefault(id(t._storage), len(places)) for t in tensors)
    if len(places) == len(tensors):
        return False
    first = _firsts(tensors)
    places_within = tuple(t._layout.offset * t._layout.dtype.itemsize - first[id(t._storage)] for t in tensors)
    same = tuple({id(t): k for k, t in enumerate(tensors)}[id(t)] for t in tensors)  # the very same tensor never counts as an overlap
    full = (func, key, sharing, same, places_within)
    refused = _REFUSED.get(full)
    if refused is None:
        refused = _REFUSED.add(full, _asked(func, args, kwargs or {}, tensors, first))
    if refused:
        raise RuntimeError(refused)
    return True


def between_entries(written: Sequence[Sequence[XLATensor]], read: Sequence[Sequence[XLATensor]]) -> bool:
    """Whether an entry of lists that are written may share memory with another entry of these, or of those that are read."""
    spans = [
        (id(t._storage), t._layout.offset * t._layout.dtype.itemsize, _end(t._layout), k, writes)
        for writes, lists in ((True, written), (False, read))
        for entries in lists
        for k, t in enumerate(entries)
        if t._layout.numel
    ]
    before: list[Any] = []
    for storage, start, end, k, writes in sorted(spans):
        before = [b for b in before if b[0] == storage and b[1] > start]
        if any(other != k and (writes or wrote) for _, _, other, wrote in before):
            return True
        before.append((storage, end, k, writes))
    return False


def check_copy(dst: XLATensor, src: XLATensor) -> None:
    """The same for `dst.copy_(src)` of two views of one storage."""
    if _partial(dst, src):
        raise RuntimeError(_MESSAGE)


def _firsts(tensors: list[XLATensor]) -> dict[int, int]:
    """The byte from which on these views share memory matters, by the `id()` of their storages."""
    first: dict[int, int] = {}
    for t in tensors:
        at = t._layout.offset * t._layout.dtype.itemsize // _ALIGNED * _ALIGNED
        first[id(t._storage)] = min(at, first.get(id(t._storage), at))
    return first


def _asked(
    func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[XLATensor], first: dict[int, int]
) -> str:
    """What torch says against it, '' if nothing."""
    length = {key: max(_end(t._layout) for t in tensors if id(t._storage) == key) - start for key, start in first.items()}
    if sum(length.values()) > MOST_BYTES:
        written = [t for i in info(func).mutated for t in _given(args, kwargs, i, info(func).names[i])]
        return _MESSAGE if any(_partial(w, t) for w in written for t in tensors) else ""
    memory = {key: torch.zeros(n // _ALIGNED * _ALIGNED + _ALIGNED, dtype=torch.uint8) for key, n in length.items()}
    twins: dict[int, torch.Tensor] = {}

    def twin(x: object) -> Any:
        if isinstance(x, XLATensor):
            if id(x) not in twins:
                twins[id(x)] = _view(memory[id(x._storage)], x._layout, first[id(x._storage)])
            return twins[id(x)]
        if isinstance(x, torch.Generator):
            return None
        return torch.device("cpu") if isinstance(x, torch.device) else x

    cpu_args, cpu_kwargs = tree_map(twin, (args, kwargs))
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            func(*cpu_args, **cpu_kwargs)
    except Exception as error:  # zeros may be no valid arguments: only one complaint counts
        return str(error) if str(error).startswith("unsupported operation") else ""
    return ""


def _given(args: tuple[Any, ...], kwargs: dict[str, Any], i: int, name: str) -> list[XLATensor]:
    value = args[i] if i < len(args) else kwargs.get(name)
    return [t for t in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(t, XLATensor)]


def _end(of: Layout) -> int:
    """The byte after its last element."""
    return (reach(of) if of.numel else of.offset + 1) * of.dtype.itemsize


def _view(memory: torch.Tensor, of: Layout, first: int) -> torch.Tensor:
    return memory.view(of.dtype).as_strided(of.size, of.stride, of.offset - first // of.dtype.itemsize)


def _partial(a: XLATensor, b: XLATensor) -> bool:
    """Whether two views share some of their memory and are not the same view, as far as torch looks: both dense."""
    x, y = a._layout, b._layout
    if (
        a is b
        or a._storage is not b._storage
        or not x.numel
        or not y.numel
        or not (is_dense(x.size, x.stride) and is_dense(y.size, y.stride))
    ):
        return False
    first = [v.offset * v.dtype.itemsize for v in (x, y)]
    last = [start + v.numel * v.dtype.itemsize for start, v in zip(first, (x, y), strict=True)]
    if first[0] == first[1] and last[0] == last[1]:
        return x.stride != y.stride
    return first[0] < last[1] and first[1] < last[0]
