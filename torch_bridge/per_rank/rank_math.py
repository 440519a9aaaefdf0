"""Functions of numbers, for numbers that differ by rank: `max`, `min`, those of `math` and `statistics`, and NumPy's give each rank its own result.

They ask a number for one float, or for a truth, and would get the first hosted rank's. So once there are such numbers they are replaced by functions that look
for them among the arguments, also where a script imported one before (`from math import sqrt`, `imported_names`).
"""

from __future__ import annotations

import builtins
import functools
import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from torch_bridge.mesh import rank_numbers
from torch_bridge.per_rank import rank_functions
from torch_bridge.recorder import rank_array
from torch_bridge.recorder.rank_tensor import RankTensor

_KINDS = frozenset(rank_numbers.KINDS)
_ARRAYS = _KINDS | {rank_array.RankArray, RankTensor}
_ON_PLACES = frozenset(
    {
        "copyto", "put", "place", "putmask", "put_along_axis", "fill_diagonal", "save", "savez", "savez_compressed", "savetxt", "array2string", "array_repr",
        "array_str", "shares_memory", "may_share_memory",
    }
)  # fmt: skip
"""Functions of NumPy's that write to an array or a file, or make text, and are no functions of numbers."""


@functools.cache
def install() -> None:
    """Once there is a number that differs by rank."""
    for module, names in ((math, vars(math)), (statistics, statistics.__all__)):
        for name in list(names):
            function = getattr(module, name)
            if callable(function) and not isinstance(function, type):
                setattr(module, name, _of_numbers(function))
    for name in ("array", "asarray", "asanyarray", "ascontiguousarray", "full"):
        setattr(np, name, _of_lists(getattr(np, name)))
    taken_over = type(np.mean)
    for name in np.__all__:  # those that arrays may take over, of lists of numbers: `np.mean(losses)`
        if type(getattr(np, name)) is taken_over and name not in _ON_PLACES:
            setattr(np, name, _of_lists(getattr(np, name)))
    for name in ("arange", "linspace", "take", "roll", "repeat", "eye"):
        setattr(np, name, _of_any(getattr(np, name)))
    for name in ("max", "min"):
        setattr(builtins, name, _of_several(getattr(builtins, name)))


def _of_numbers(original: Callable[..., Any]) -> Callable[..., Any]:
    """A function of numbers, or of one sequence of numbers (`math.prod`)."""

    @functools.wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        for x in (*args, *kwargs.values()) if kwargs else args:
            if type(x) in _KINDS or (type(x) in (list, tuple) and not _KINDS.isdisjoint(map(type, x))):
                return _each(original, args, kwargs)
        return original(*args, **kwargs)

    return function


def _of_several(original: Callable[..., Any]) -> Callable[..., Any]:
    """`max` and `min`, of numbers or of one list of them."""

    @functools.wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        given = args[0] if len(args) == 1 and type(args[0]) in (list, tuple) else args
        return original(*args, **kwargs) if _KINDS.isdisjoint(map(type, given)) else _each(original, args, kwargs)

    return function


def _of_lists(original: Callable[..., Any]) -> Callable[..., Any]:
    """A function that makes an array of numbers or arrays, or of nested lists of them."""

    @functools.wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        for x in (*args, *kwargs.values()) if kwargs else args:
            if type(x) in _ARRAYS or (type(x) in (list, tuple) and rank_functions.hold_ranks(x)):
                return rank_array.on_each(original, args, kwargs)
        return original(*args, **kwargs)

    return function


def _of_any(original: Callable[..., Any]) -> Callable[..., Any]:
    """A function of NumPy's that asks one of its arguments for a plain number."""

    @functools.wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        if _KINDS.isdisjoint(map(type, (*args, *kwargs.values()))):
            return original(*args, **kwargs)
        return rank_array.on_each(original, args, kwargs)

    return function


def _each(original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Each rank's result, for all of the world or, of numbers read from tensors, for those that this process hosts."""
    from torch_bridge.mesh import world

    hosted = world.current().hosted
    if any(map(rank_numbers.is_item, _numbers([*args, *kwargs.values()]))):
        return _joined([original(*rank_array.own(args, k), **rank_array.own(kwargs, k)) for k in range(len(hosted))], rank_numbers.item)
    found = rank_numbers.for_all(
        lambda r: original(*_of_rank(args, r), **{k: _of_rank(v, r) for k, v in kwargs.items()}), world.size(), hosted
    )
    return _joined(found, lambda values: rank_numbers.ranked(values, hosted))


def _joined(found: Sequence[Any], join: Callable[[tuple[Any, ...]], Any]) -> Any:
    """One number, or tuple of numbers (`math.modf`), of several."""
    if isinstance(found[0], tuple):
        return tuple(_joined(row, join) for row in zip(*found, strict=True))
    return join(tuple(found))


def _numbers(args: Any) -> list[Any]:
    return [x for a in args for x in (a if type(a) in (list, tuple) else [a])]


def _of_rank(x: Any, rank: int) -> Any:
    """The same arguments as this rank of the world has them."""
    if type(x) in (list, tuple):
        return type(x)(_of_rank(v, rank) for v in x)
    values = rank_numbers.values_of(x)
    return x if values is None else values[rank]
