"""What is on the right of `in`."""

from __future__ import annotations

import enum
import os
import types
from collections.abc import Callable
from typing import Any

import torch

from torch_bridge.guards.conditions import MISSING
from torch_bridge.guards.observer import ACTIVE, Observer
from torch_bridge.guards.probes.calling import call
from torch_bridge.guards.probes.items import key_label
from torch_bridge.guards.probes.iteration import iterate
from torch_bridge.guards.probes.kinds import BUILTIN, ITERATORS, VIEWS
from torch_bridge.guards.probes.operators import check_elements, hashed
from torch_bridge.guards.values import is_a, unchanging


def container(x: Any) -> Any:
    """What is on the right of `in`."""
    observer = ACTIVE.observer
    if observer is None or observer.reason or (unchanging(x) and not is_a(x, type)) or is_a(x, torch.Tensor):
        return x
    kind = type(x)
    if is_a(x, os._Environ):
        return _Variables(observer, x)
    if kind in (*BUILTIN, tuple):
        if is_a(x, dict):
            return x if observer.follows(x) else _Keys(observer, x)
        observer.elements(x)
        check_elements(observer, x, "searches")
        return x
    if is_a(x, type):
        if not issubclass(kind, type(enum.Enum)):
            observer.refuse(f"it searches the class {x.__name__}")
        return x
    how = observer.lookup(kind, "__contains__")
    if is_a(how, types.FunctionType):
        return _Contains(how, x)
    if (kind in VIEWS or is_a(x, ITERATORS)) and observer.is_own(x):
        return x
    if is_a(x, dict):
        return x if observer.follows(x) else _Keys(observer, x)
    if is_a(x, tuple):
        return x
    if how is MISSING:
        return iterate(x)
    observer.refuse(f"it searches a {kind.__name__}")
    return x


class _Contains:
    """Stands on the right of `in` for an object whose class says in Python what is in it."""

    def __init__(self, how: Callable[[object, object], bool], x: Any):
        self._how, self._x = how, x

    def __contains__(self, value: object) -> bool:
        return bool(call(self._how, self._x, value))


class _Variables:
    """Stands on the right of `in` for the environment."""

    def __init__(self, observer: Observer, x: Any):
        self._observer, self._x = observer, x

    def __contains__(self, key: Any) -> bool:
        found = key in self._x
        self._observer.conditions.question(self._x.__contains__, (key,), found, f"the environment variable {key}")
        return found


class _Keys:
    """Stands on the right of `in` for a dict that was there before: only the key that is asked for counts."""

    def __init__(self, observer: Observer, x: Any):
        self._observer, self._x = observer, x

    def __contains__(self, key: Any) -> bool:
        hashed(key)
        if not self._observer.reason:
            self._observer.entry(self._x, self._x, key, f"[{key_label(key)}] of a {type(self._x).__name__}")
        return key in self._x
