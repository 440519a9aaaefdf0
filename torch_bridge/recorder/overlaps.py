"""In-place ops whose output shares memory with an input: torch refuses what depends on the order of its writes, and so do we.

Which ops refuse which overlaps is torch's to say: where arguments share a storage, its CPU kernel is asked, once for each signature, on tensors of zeros that
share memory in the same way. Memory that expand() repeats is refused where a view is written (`segment`).
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch.utils._pytree import tree_map

from torch_bridge.ir.layout import Layout, is_dense
from torch_bridge.ir.segment import Storage
from torch_bridge.recorder.schema import info
from torch_bridge.recorder.tensor import XLATensor

MOST_ELEMENTS = 1 << 22
"""Elements of all arguments up to which torch is asked; above, what holds for nearly all ops is applied: an input that is partly the output is refused."""

_MESSAGE = (
    "unsupported operation: some elements of the input tensor and the written-to tensor refer to a single memory location. "
    "Please clone() the tensor before performing the operation."
)
_REFUSED: dict[Any, str] = {}


def check(
    func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any] | None, tensors: list[XLATensor], key: tuple[Any, ...]
) -> None:
    """RuntimeError if torch's own op refuses to write where these arguments (`tensors`, of the signature `key`) share memory."""
    places: dict[int, int] = {}
    sharing = tuple(places.setdefault(id(t._storage), len(places)) for t in tensors)
    if len(places) == len(tensors):
        return
    same = tuple({id(t): k for k, t in enumerate(tensors)}[id(t)] for t in tensors)  # the very same tensor never counts as an overlap
    full = (func, key, sharing, same, tuple(t._layout.offset for t in tensors))
    refused = _REFUSED.get(full)
    if refused is None:
        refused = _REFUSED[full] = _asked(func, args, kwargs or {}, tensors)
    if refused:
        raise RuntimeError(refused)


def check_copy(dst: XLATensor, src: XLATensor) -> None:
    """The same for `dst.copy_(src)` of two views of one storage."""
    if _partial(dst, src):
        raise RuntimeError(_MESSAGE)


def _asked(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[XLATensor]) -> str:
    """What torch says against it, '' if nothing."""
    storages = {id(t._storage): t._storage for t in tensors}
    if sum(s.layout.numel for s in storages.values()) > MOST_ELEMENTS:
        written = [t for i in info(func).mutated for t in _given(args, kwargs, i, info(func).names[i])]
        return _MESSAGE if any(_partial(w, t) for w in written for t in tensors) else ""
    memory = {key: _zeros(storage) for key, storage in storages.items()}
    twins: dict[int, torch.Tensor] = {}

    def twin(x: object) -> Any:
        if isinstance(x, XLATensor):
            if id(x) not in twins:
                twins[id(x)] = _view(memory[id(x._storage)], x._layout)
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


def _zeros(storage: Storage) -> torch.Tensor:
    """The bytes of a storage, some more for views of wider dtypes."""
    return torch.zeros(storage.layout.numel * storage.layout.dtype.itemsize // 16 * 16 + 16, dtype=torch.uint8)


def _view(memory: torch.Tensor, of: Layout) -> torch.Tensor:
    return memory.view(of.dtype).as_strided(of.size, of.stride, of.offset)


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
