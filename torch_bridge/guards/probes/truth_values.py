"""Conditions: `if`, `while`, `not`, `and`, `or`."""

from __future__ import annotations

import types
from typing import Any

import numpy as np
import torch

from torch_bridge.guards.conditions import MISSING
from torch_bridge.guards.libraries import is_library
from torch_bridge.guards.observer import ACTIVE, Observer
from torch_bridge.guards.probes.calling import call
from torch_bridge.guards.probes.kinds import BUILTIN
from torch_bridge.guards.values import is_a, unchanging


def truth(x: Any) -> bool:
    """Whether a condition is true."""
    observer = ACTIVE.observer
    if observer is None or observer.reason:
        return bool(x)
    kind = type(x)
    if (unchanging(x) and not is_a(x, type)) or is_a(x, torch.Tensor):
        return bool(x)
    if kind in (*BUILTIN, tuple) and not is_a(x, tuple):
        if not observer.follows(x):
            observer.conditions.question(bool, (x,), bool(x), f"whether a {kind.__name__} is empty")
        return bool(x)
    if is_a(x, np.ndarray):
        observer.array(x)
        return bool(x)
    if is_a(x, (np.generic, torch.SymInt, torch.SymFloat, torch.SymBool)):
        return bool(x)
    for name in ("__bool__", "__len__"):
        how = observer.lookup(kind, name)
        if is_a(how, types.FunctionType):
            found = call(how, x)
            if name == "__bool__" and type(found) is not bool:
                raise TypeError(f"__bool__ should return bool, returned {type(found).__name__}")
            return bool(found)
        if how is not MISSING and how is not None:
            if observer.is_own(x) or is_a(x, tuple):
                return bool(x)
            if is_a(x, (dict, list, set)):
                observer.conditions.question(bool, (x,), bool(x), f"whether a {kind.__name__} is empty")
                return bool(x)
            observer.refuse(f"it asks whether a {kind.__name__} is true")
            return bool(x)
    if not observer.is_own(x) and not is_a(x, (type, types.FunctionType, types.ModuleType, types.MethodType)):
        observer.conditions.object(x)
    return True


def condition(x: object) -> Any:
    """An operand of `and` or `or`."""
    observer = ACTIVE.observer
    if observer is not None and not observer.reason and not is_a(x, torch.Tensor):
        if _is_asked_in_python(observer, x):
            observer.refuse(f"it asks whether a {type(x).__name__} is true, beside `and` or `or`")  # asked here, it would be asked twice
        else:
            truth(x)
    return x


def _is_asked_in_python(observer: Observer, x: object) -> bool:
    for name in ("__bool__", "__len__"):
        how = observer.lookup(type(x), name)
        if how is not MISSING:
            return is_a(how, types.FunctionType) and not is_library(how.__code__)
    return False
