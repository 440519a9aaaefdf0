"""Operands of operators, comparisons, f-strings, and keys of dicts."""

from __future__ import annotations

import types
import weakref
from typing import Any

import numpy as np
import torch

from torch_bridge.guards.observer import ACTIVE, Observer
from torch_bridge.guards.probes.kinds import BUILTIN, VIEWS, in_python
from torch_bridge.guards.values import is_a, unchanging

_OPERATORS = (
    "__eq__",
    "__lt__",
    "__add__",
    "__radd__",
    "__mul__",
    "__contains__",
    "__iter__",
    "__len__",
    "__bool__",
    "__str__",
    "__repr__",
    "__format__",
)


def operand(x: object) -> Any:
    """A value that an operator is applied to."""
    return _operand(x, "applies an operator to")


def joined(x: object) -> Any:
    """What `+` and `*` give: of lists, a new one."""
    observer = ACTIVE.observer
    return observer.own(x) if observer is not None and type(x) is list else x


def compared(x: object) -> Any:
    """A value that is compared."""
    observer = ACTIVE.observer
    if observer is not None and not observer.reason and _compares_by_identity(observer, x):
        return x
    return _operand(x, "compares")


def identified(x: object) -> Any:
    """A value whose identity is compared. Of those that may be exchanged for equal ones nothing may be concluded."""
    observer = ACTIVE.observer
    if observer is not None and not observer.reason and (type(x) in _EXCHANGED or (type(x) is torch.Tensor and x.device.type == "cpu")):
        observer.refuse(f"it compares the identity of a {type(x).__name__}")
    return x


_EXCHANGED = (float, complex, tuple)


def formatted(x: Any) -> Any:
    """A value in an f-string. A tensor of one number is that number, which is asked for as by `.item()`."""
    observer = ACTIVE.observer
    if observer is not None and not observer.reason and is_a(x, torch.Tensor) and x.dim():
        observer.refuse("it prints a tensor")
    if is_a(x, (types.FunctionType, type)):
        return x
    return _operand(x, "prints")


def printed(x: object) -> Any:
    """A value in an f-string whose `repr` or `str` is taken (`{x!r}`)."""
    observer = ACTIVE.observer
    if observer is not None and not observer.reason and is_a(x, torch.Tensor):
        observer.refuse("it prints a tensor")
    return formatted(x)


def hashed(x: Any) -> Any:
    """A key of a dict, or an element of a set."""
    observer = ACTIVE.observer
    if observer is None or observer.reason or unchanging(x):
        return x
    if type(x) is tuple:
        for y in x:
            hashed(y)
    elif is_a(x, weakref.ref):
        hashed(x())
    elif observer.lookup(type(x), "__hash__") is not object.__hash__ and not is_a(x, _HASHED_BY_IDENTITY):
        observer.refuse(f"it uses a {type(x).__name__} as a key")
    return x


_HASHED_BY_IDENTITY = (torch.Tensor, types.FunctionType, types.MethodType, types.BuiltinFunctionType, types.ModuleType, torch.nn.Module)


def _compares_by_identity(observer: Observer, x: object) -> bool:
    return not is_a(x, torch.Tensor) and observer.lookup(type(x), "__eq__") is object.__eq__


def _operand(x: Any, doing: str) -> Any:
    observer = ACTIVE.observer
    if observer is None or observer.reason or is_a(x, torch.Tensor) or unchanging(x):
        return x
    if is_a(x, (*BUILTIN, tuple)) and type(x) in (*BUILTIN, tuple):
        observer.elements(x)
        check_elements(observer, x, doing)
    elif is_a(x, np.ndarray):
        observer.array(x)
    elif (
        is_a(x, np.generic)
        or (type(x) in VIEWS and observer.is_own(x))
        or is_a(x, (torch.SymInt, torch.SymFloat, torch.SymBool))
        or (is_a(x, tuple) and not in_python(observer, x, _OPERATORS))
    ):
        pass
    else:
        observer.refuse(f"it {doing} a {type(x).__name__}")
    return x


def check_elements(observer: Observer, x: Any, doing: str) -> None:
    for y in x:
        if not unchanging(y) and not is_a(y, (torch.Tensor, *BUILTIN, tuple)) and not _compares_by_identity(observer, y):
            observer.refuse(f"it {doing} a {type(x).__name__} with a {type(y).__name__} in it")
