"""Items of containers, arrays and tensors: reads, writes and deletions."""

from __future__ import annotations

import collections
import os
import types
from typing import Any

import numpy as np
import torch

from torch_bridge.guards.conditions import MISSING
from torch_bridge.guards.observer import ACTIVE
from torch_bridge.guards.probes.arguments import check_arguments
from torch_bridge.guards.probes.calling import call
from torch_bridge.guards.probes.kinds import BUILTIN
from torch_bridge.guards.probes.operators import hashed
from torch_bridge.guards.probes.updates import update
from torch_bridge.guards.values import is_a, unchanging


def item(x: Any, key: Any) -> Any:
    """`x[key]`."""
    observer = ACTIVE.observer
    if observer is None or observer.reason:
        return x[key]
    kind = type(x)
    if is_a(x, torch.Tensor):
        check_arguments(observer, (key,), {}, "indexes a tensor with")
        return x[key]
    if kind is tuple or unchanging(x) or is_a(x, type):
        return x[key]
    if kind in BUILTIN and (observer.is_own(x) or observer.is_given(x)):
        hashed(key)
        return observer.own(x[key]) if is_a(key, slice) else x[key]
    if is_a(x, dict) and observer.lookup(kind, "__getitem__") in _DICT_GETITEMS:
        hashed(key)
        if observer.reason:
            return x[key]
        value = observer.entry(x, x, key, f"[{key_label(key)}] of a {kind.__name__}")
        if value is MISSING and observer.lookup(kind, "__missing__") is not MISSING:
            observer.effect(f"it adds to a {kind.__name__}")
        return x[key] if value is MISSING else value
    if kind in BUILTIN:
        observer.elements(x)
        return observer.own(x[key]) if is_a(key, slice) else observer.seen(x[key])
    if is_a(x, np.ndarray):
        observer.array(x)
        found = x[key]
        return observer.own(found) if is_a(found, np.ndarray) and observer.is_own(x) else found
    if is_a(x, os._Environ):
        observer.conditions.question(x.get, (key, MISSING), x.get(key, MISSING), f"the environment variable {key}")
        return x[key]
    if is_a(x, tuple) and observer.lookup(kind, "__getitem__") is tuple.__getitem__:
        return observer.seen(x[key])
    how = observer.lookup(kind, "__getitem__")
    if is_a(how, types.FunctionType):
        return call(how, x, key)
    if observer.is_own(x) and is_a(x, (list, dict)):
        return x[key]
    observer.refuse(f"it reads an item of a {kind.__name__}")
    return x[key]


_DICT_GETITEMS = (dict.__getitem__, collections.OrderedDict.__getitem__, collections.defaultdict.__getitem__)


def key_label(key: object) -> str:
    return repr(key)[:40] if unchanging(key) else f"a {type(key).__name__}"


def make_slice(start: object, stop: object, step: object) -> slice:
    """`start:stop:step`."""
    return slice(start, stop, step)


def set_item(value: Any, x: Any, key: Any) -> None:
    """`x[key] = value`."""
    observer = ACTIVE.observer
    if observer is not None and not observer.reason:
        kind = type(x)
        if is_a(x, torch.Tensor):
            check_arguments(observer, (key, value), {}, "writes into a tensor at")
            if not observer.may_write_host(x):
                observer.refuse("it writes into a CPU tensor that was there before")
        elif not observer.is_own(x):
            if kind is dict and not observer.is_given(x) and not observer.reason and hashed(key) is key and not observer.reason:
                observer.writes(x, x, key, f"[{key_label(key)}] of a dict")
            else:
                how = observer.lookup(kind, "__setitem__")
                if is_a(how, types.FunctionType):
                    call(how, x, key, value)
                    return
                observer.effect(f"it changes a {kind.__name__}" + (" that it was given" if observer.is_given(x) else ""))
        else:
            how = observer.lookup(kind, "__setitem__")
            if is_a(how, types.FunctionType):
                call(how, x, key, value)
                return
            hashed(key)
    x[key] = value


def delete_item(x: Any, key: Any) -> None:
    """`del x[key]`."""
    observer = ACTIVE.observer
    if observer is not None and not observer.reason and not observer.is_own(x):
        if type(x) is dict and not observer.is_given(x) and hashed(key) is key and not observer.reason:
            observer.writes(x, x, key, f"[{key_label(key)}] of a dict")
        else:
            observer.effect(f"it changes a {type(x).__name__}")
    del x[key]


def item_before(x: object, key: object) -> tuple[Any, Any, Any]:
    """The left of `x[key] += value`, which is read before the right."""
    return x, key, item(x, key)


def update_item(x: object, key: object, before: object, op: str, value: object) -> None:
    """`x[key] += value` and the like."""
    set_item(update(before, op, value), x, key)
