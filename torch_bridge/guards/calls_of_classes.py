"""Calls of classes: what makes a new object, which is the run's own."""

from __future__ import annotations

import collections
import dataclasses
import enum
import types
from typing import Any

import torch

from torch_bridge.guards import probes
from torch_bridge.guards.conditions import MISSING
from torch_bridge.guards.observer import Args, Kwargs, Observer
from torch_bridge.guards.unfollowed import OURS, has_objects, is_generated, opaque
from torch_bridge.guards.values import is_a


def follow_class(observer: Observer, cls: type, args: Args, kwargs: Kwargs) -> Any:
    """A new object."""
    if issubclass(cls, BaseException) or issubclass(cls, enum.Enum):
        return cls(*args, **kwargs)
    meta = type(cls)
    if observer.lookup(meta, "__call__") is not type.__call__:
        return opaque(observer, cls, args, kwargs)
    if cls.__module__.startswith(_TORCH_CLASSES) and not issubclass(cls, torch.nn.Module):
        probes.check_arguments(observer, args, kwargs, f"makes a {cls.__name__} of")
        return observer.own(cls(*args, **kwargs))
    if observer.lookup(cls, "__del__") is not MISSING:
        observer.refuse(f"it makes a {cls.__name__}, which has a finalizer")
    new, init = observer.lookup(cls, "__new__"), observer.lookup(cls, "__init__")
    if cls.__module__.startswith(OURS) and not issubclass(cls, torch.nn.Module) and not has_objects(args, kwargs):
        return observer.own(cls(*args, **kwargs))
    if issubclass(cls, tuple):
        return _named_tuple(observer, cls, args, kwargs)
    if new is not object.__new__ and is_a(new, staticmethod):
        made = observer.caller(observer, new.__func__, (cls, *args), kwargs)  # it may be one that was there before
    elif new in PLAIN_NEW:
        made = observer.own(new(cls))
    else:
        return opaque(observer, cls, args, kwargs)
    if not is_a(made, cls):
        return made
    if is_a(init, types.FunctionType):
        if is_generated(init) and dataclasses.is_dataclass(cls):
            return _data_instance(observer, cls, init, made, args, kwargs)
        observer.caller(observer, init, (made, *args), kwargs)
    elif init is object.__init__:
        if new is object.__new__ and (args or kwargs):
            return cls(*args, **kwargs)  # it says what is wrong
    elif init in _PLAIN_INIT:
        for x in args:
            probes.iterate(x) if not is_a(x, dict) else probes.merged(x)
        init(made, *args, **kwargs)
    else:
        return opaque(observer, cls, args, kwargs)
    return made


PLAIN_NEW = (
    object.__new__,
    dict.__new__,
    list.__new__,
    set.__new__,
    collections.OrderedDict.__new__,
    collections.defaultdict.__new__,
    collections.deque.__new__,
)
_PLAIN_INIT = (dict.__init__, list.__init__, set.__init__, collections.OrderedDict.__init__, collections.deque.__init__)
_TORCH_CLASSES = ("torch.autograd.grad_mode", "torch.amp.autocast_mode", "torch.autograd.profiler")


def _data_instance(observer: Observer, cls: type, init: types.FunctionType, made: object, args: Args, kwargs: Kwargs) -> Any:
    """Of a dataclass: the generated `__init__` sets its fields and calls `__post_init__`, which the watchdog sees."""
    for field in dataclasses.fields(cls):
        if field.default_factory is not dataclasses.MISSING and field.default_factory not in (list, dict, set):
            observer.refuse(f"it makes a {cls.__name__}, a dataclass with a default_factory")
    assert observer.watchdog is not None
    observer.lookup(cls, "__post_init__")
    observer.watchdog.allowed.add(init.__code__)
    init(made, *args, **kwargs)
    for value in (_slot(made, field.name) for field in dataclasses.fields(cls)):
        if type(value) in (list, dict, set) and not any(value is x for x in (*args, *kwargs.values())):
            observer.own(value)
    return made


def _slot(x: object, name: str) -> Any:
    try:
        return object.__getattribute__(x, name)
    except AttributeError:
        return None


def _named_tuple(observer: Observer, cls: type, args: Args, kwargs: Kwargs) -> Any:
    new = observer.lookup(cls, "__new__")
    function = getattr(new, "__func__", new)
    if cls is torch.Size or (is_a(function, types.FunctionType) and _is_named_tuple_code(function) and hasattr(cls, "_fields")):
        if is_a(function, types.FunctionType) and observer.watchdog is not None:
            observer.watchdog.allowed.add(function.__code__)
        return cls(*args, **kwargs)
    return opaque(observer, cls, args, kwargs)


def _is_named_tuple_code(f: types.FunctionType) -> bool:
    return f.__code__.co_filename.startswith("<string>") or "namedtuple" in f.__code__.co_filename
