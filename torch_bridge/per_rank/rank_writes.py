"""CPU tensors that ranks share, written with what differs by rank: `batch[i] = data[rank * n + i]`, `weight.copy_(full[rank])`, `param.data = part`, and an
optimizer's step. Such a tensor is each rank's own from then on, where nothing else lies in its memory; else that is an error.

And plain tensors indexed with tensors that differ by rank: `data[i]` for an `i` out of them.
"""

from __future__ import annotations

import ast
import copy
import dis
import functools
import inspect
import sys
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_leaves

from torch_bridge.mesh import rank_numbers
from torch_bridge.per_rank import rank_functions
from torch_bridge.recorder import rank_tensor
from torch_bridge.recorder.rank_tensor import RankTensor
from torch_bridge.script import rank_syntax

_DATA: Any = torch._C.TensorBase.data
_KINDS = frozenset(rank_numbers.KINDS)
_ENDS = _KINDS | {RankTensor}
_TRUTHS = {"equal", "allclose"}


@functools.cache
def install() -> None:
    """Once there are numbers that differ by rank."""
    torch.Tensor.__setitem__ = _writing(torch.Tensor.__setitem__)  # type: ignore[method-assign]
    _data.__name__ = "data"  # by which errors call it
    torch.Tensor.data = property(_data, _set_data)  # type: ignore[assignment]


def call(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A torch function with a tensor that differs by rank among its arguments (`RankTensor.__torch_function__`)."""
    kind = _kind(func)
    if kind == "write" and args and isinstance(args[0], RankTensor) and args[0].shared and _is_assigned_again(sys._getframe(3)):
        args = (copy.deepcopy(args[0]), *args[1:])
    if _hold_numbers(args) or (kwargs and _hold_numbers(kwargs.values())):
        return rank_numbers.hooks().torch_function(func, args, kwargs)
    with torch._C.DisableTorchFunctionSubclass():
        if kind == "__getitem__":
            return _getitem(func, *args)
        if kind == "__setitem__" and _sets(*args):
            return rank_functions.compute(func, args, kwargs)
        if kind == "truth" and not any(rank_numbers.is_ranked(x) or _is_elsewhere(x) for x in args):
            return rank_tensor.join(rank_tensor.on_each(func, args, kwargs), None, set())
        if kind == "statistics":
            for t in _statistics(func, *args, **kwargs):
                rank_tensor.divide(t)
        if kind == "write" or kwargs.get("out") is not None:
            for t in tree_leaves(kwargs["out"]) if kwargs.get("out") is not None else tree_leaves(args[:1]):
                rank_tensor.divide(t)
        return func(*args, **kwargs)


def _hold_numbers(given: Iterable[Any]) -> bool:
    """Whether numbers that differ by rank are among some, or in lists of them."""
    return any(type(x) in _KINDS or (type(x) in (list, tuple) and _hold_numbers(x)) for x in given)


@functools.lru_cache(maxsize=4096)
def _kind(func: Callable[..., Any]) -> str:
    name = getattr(func, "__name__", "")
    if name in ("__getitem__", "__setitem__"):
        return name
    if name in _TRUTHS:
        return "truth"
    if func in (F.batch_norm, F.instance_norm):
        return "statistics"
    return "write" if name.endswith("_") and not name.endswith("__") and name not in _MARKING else ""


def _statistics(
    func: Callable[..., Any], x: object, mean: object = None, var: object = None, *args: object, **kwargs: object
) -> list[torch.Tensor]:
    """The running statistics that a norm writes."""
    given = inspect.signature(func).bind(x, mean, var, *args, **kwargs).arguments
    writes = given.get("training", False) if func is F.batch_norm else given.get("use_input_stats", True)
    return [t for t in (mean, var) if isinstance(t, torch.Tensor)] if writes else []


def _is_assigned_again(frame: FrameType) -> bool:
    """Whether a frame is at `x[index] += value` of a tensor: the sum of a part is assigned to the part next."""
    at = frame.f_lasti
    if dis.opname[frame.f_code.co_code[at]] != "BINARY_OP" or frame.f_code.co_code[at + 1] < _IN_PLACE:
        return False
    where = list(frame.f_code.co_positions())[at // 2]
    tree = rank_syntax.tree(frame.f_code.co_filename)
    for node in ast.walk(tree) if tree is not None else ():
        if isinstance(node, ast.AugAssign) and (node.lineno, node.end_lineno, node.col_offset, node.end_col_offset) == where:
            names = rank_syntax.Names(frame.f_locals, frame.f_globals)
            return isinstance(node.target, ast.Subscript) and isinstance(names.value(node.target.value), torch.Tensor)
    return False


_IN_PLACE = next(k for k, (name, _) in enumerate(dis._nb_ops) if name == "NB_INPLACE_ADD")  # type: ignore[attr-defined]
_MARKING = {"requires_grad_", "rename_", "detach_", "share_memory_", "retain_grad_"}


def _is_elsewhere(x: object) -> bool:
    return isinstance(x, torch.Tensor) and x.device.type != "cpu"


# -- indices ----------------------------------------------------------------------------------------


def _is_number(x: object) -> bool:
    """Whether this is one integer for each rank, which torch would ask for a plain one."""
    return isinstance(x, RankTensor) and not x.dim() and not x.dtype.is_floating_point and x.dtype not in (torch.bool, torch.uint8)


def _getitem(func: Callable[..., Any], x: torch.Tensor, index: object) -> torch.Tensor:
    items: list[Any] = list(index) if isinstance(index, tuple) else [index]
    items = [torch.tensor(i) if type(i) is list and rank_functions.hold_ranks(i) else i for i in items]
    numbers = [k for k, i in enumerate(items) if _is_number(i)]
    if not numbers:
        found: torch.Tensor = func(x, tuple(items) if isinstance(index, tuple) else items[0])
        return found
    others = [i for k, i in enumerate(items) if k not in numbers]
    if len(numbers) > 1 or any(isinstance(i, (torch.Tensor, list, bool)) or rank_numbers.is_ranked(i) for i in others):
        if _is_elsewhere(x):
            raise rank_numbers.refuse([p.item() for p in items[numbers[0]].parts])
        found = rank_functions.compute(func, (x, tuple(items)), {})
        return found
    (at,) = numbers
    taken = items[at].reshape(1)
    items[at] = taken.to(x.device) if _is_elsewhere(x) else taken
    kept = sum(i is None or isinstance(i, slice) for i in items[:at])
    if any(i is Ellipsis for i in items[:at]):
        kept += x.dim() - sum(i is not None and i is not Ellipsis for i in items)
    return func(x, tuple(items)).squeeze(kept)


# -- writes -----------------------------------------------------------------------------------------


def _sets(x: torch.Tensor, index: object, value: object) -> bool:
    """Whether an assignment is one for each rank of a CPU tensor, which can be each rank's own."""
    if _is_elsewhere(x):
        return False
    return isinstance(x, RankTensor) or rank_tensor.divide(x)


def _writing(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def __setitem__(self: torch.Tensor, index: object, value: object) -> None:
        ranked = any(map(_differs, index)) if type(index) is tuple else _differs(index)
        if ranked and _sets(self, index, value):
            return rank_functions.compute(original, (self, index, value), {})
        return original(self, index, value)

    return __setitem__


def _differs(index: object) -> bool:
    """Whether an index differs by rank: a number, or a slice between some. (Tensors come by `call`.)"""
    if type(index) is slice:
        return type(index.start) in _ENDS or type(index.stop) in _ENDS or type(index.step) in _ENDS
    return type(index) in _KINDS


def _data(self: torch.Tensor) -> torch.Tensor:
    """`Tensor.data`, which knows whose it is on the CPU: a write to it may make its owner differ by rank."""
    found: torch.Tensor = _DATA.__get__(self)
    return rank_tensor.note_data(self, found) if type(found) is torch.Tensor and found.is_cpu else found


def _set_data(self: torch.Tensor, value: torch.Tensor) -> None:
    if isinstance(value, RankTensor) or (isinstance(self, RankTensor) and isinstance(value, torch.Tensor) and value.is_cpu):
        rank_tensor.rebind(self, value)
    else:
        _DATA.__set__(self, value)
