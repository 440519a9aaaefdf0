"""What is gone through: `for`, `*x`, `**x`, unpacking."""

from __future__ import annotations

import enum
import types
from typing import Any

import numpy as np
import torch

from torch_bridge.guards.observer import ACTIVE
from torch_bridge.guards.probes.attributes import attribute
from torch_bridge.guards.probes.calling import call
from torch_bridge.guards.probes.items import item
from torch_bridge.guards.probes.kinds import BUILTIN, ITERATORS, VIEWS, in_python
from torch_bridge.guards.values import is_a, unchanging


def iterate(x: Any) -> Any:
    """What is gone through: `for`, `*x`, unpacking."""
    observer = ACTIVE.observer
    if observer is None or observer.reason:
        return x
    kind = type(x)
    if is_a(x, torch.Tensor) or kind is tuple or (unchanging(x) and not is_a(x, type)):
        return x
    if is_a(x, ITERATORS):
        if not observer.is_own(x):
            observer.refuse(f"it takes elements from a {kind.__name__} that was there before, which is an iterator")
        return x
    if kind in BUILTIN:
        observer.elements(x)
        return x
    if (kind in VIEWS and observer.is_own(x)) or (is_a(x, tuple) and not in_python(observer, x, ("__iter__",))):
        return x
    if is_a(x, np.ndarray):
        observer.array(x)
        return x
    how = observer.lookup(kind, "__iter__")
    if is_a(how, types.FunctionType):
        found = call(how, x)
        if not hasattr(type(found), "__next__"):
            raise TypeError(f"iter() returned non-iterator of type '{type(found).__name__}'")
        if not is_a(found, ITERATORS):
            observer.refuse(f"it goes through a {kind.__name__}")
        return found
    if is_a(x, type) and is_a(x, type(enum.Enum)):
        return x
    if is_a(x, (dict, list, set)) and observer.is_own(x):
        return x
    observer.refuse(f"it goes through a {kind.__name__}")
    return x


def merged(x: object) -> Any:
    """What `**` takes entries from."""
    observer = ACTIVE.observer
    if observer is None or observer.reason:
        return x
    if is_a(x, dict) and not in_python(observer, x, ("__getitem__", "keys", "__iter__")):
        observer.elements(x) if type(x) in BUILTIN else observer.refuse(
            f"it takes entries from a {type(x).__name__}"
        ) if not observer.is_own(x) else None
        return x
    keys = attribute(x, "keys")
    return {k: item(x, k) for k in iterate(call(keys))}
