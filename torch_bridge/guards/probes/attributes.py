"""Reads of attributes, by the rules of Python's data model: through classes, instances and `__getattr__`."""

from __future__ import annotations

import enum
import functools
import types
from typing import Any

import torch

from torch_bridge.guards.conditions import MISSING
from torch_bridge.guards.observer import ACTIVE, Observer
from torch_bridge.guards.probes.calling import call
from torch_bridge.guards.probes.kinds import FIELD, called
from torch_bridge.guards.probes.tensor_attributes import attribute_of_tensor
from torch_bridge.guards.values import is_a, unchanging

_TORCH_MODULE_GETATTR = torch.nn.Module.__getattr__


def attribute(x: Any, name: str) -> Any:
    """`x.name`."""
    observer = ACTIVE.observer
    if observer is None or observer.reason:
        return getattr(x, name)
    raised: list[AttributeError] = []
    try:
        found = _attribute(observer, x, name, raised)
        if found is not MISSING:
            return found
        if raised:
            raise raised[-1]
        return getattr(x, name)  # it raises, as it should
    finally:
        raised.clear()  # errors know their frames, which know the errors, and tensors


def _attribute(observer: Observer, x: Any, name: str, raised: list[AttributeError]) -> Any:
    """The value, with what decided it noted; MISSING if there is none. raised: what code in Python raised to say so."""
    kind = type(x)
    if is_a(x, torch.Tensor):
        return attribute_of_tensor(observer, x, name)
    if kind is types.ModuleType or is_a(x, types.ModuleType):
        return _of_python_module(observer, x, name)
    if is_a(x, type):
        return _of_class(observer, x, name)
    if kind is super:
        return _of_super(observer, x, name)
    if unchanging(x) and not is_a(x, tuple) and (not is_a(x, enum.Enum) or name in ("name", "value", "_name_", "_value_")):
        return getattr(x, name, MISSING)
    how = observer.lookup(kind, "__getattribute__")
    if is_a(how, types.FunctionType):
        try:
            return call(how, x, name)
        except AttributeError as error:
            raised.append(error)
            return _by_getattr(observer, x, name, raised)
    if getattr(getattr(how, "__objclass__", None), "__module__", "") not in _PLAINLY_KEPT:
        observer.refuse(f"it reads {called(x)}.{name}, which is kept in a way of its own")
        return getattr(x, name, MISSING)
    return standard(observer, x, name, raised)


_PLAINLY_KEPT = (
    "builtins",
    "collections",
    "functools",
    "enum",
    "types",
    "contextvars",
    "_contextvars",
    "numpy",
    "re",
    "itertools",
    "datetime",
    "decimal",
    "fractions",
)
"""Modules with classes in C whose attributes are found as those of any object are."""


def standard(observer: Observer, x: object, name: str, raised: list[AttributeError], fall_back: bool = True) -> Any:
    """`object.__getattribute__`, and `__getattr__` behind it."""
    kind = type(x)
    if name == "__class__" and observer.lookup(kind, name) is _CLASS:
        observer.conditions.object(x)
        return kind
    raw = observer.lookup(kind, name)
    if not observer.is_own(x) and not unchanging(x):
        observer.conditions.object(x)
    if raw is not MISSING and is_data_descriptor(raw):
        return _bound(observer, raw, x, kind, name, raised)
    held = dict_of(x)
    if held is not None:
        value = observer.entry(x, held, name, f"{called(x)}.{name}")
        if value is not MISSING:
            return value
    if raw is not MISSING:
        return _bound(observer, raw, x, kind, name, raised)
    return _by_getattr(observer, x, name, raised) if fall_back else MISSING


_CLASS = vars(object)["__class__"]


def dict_of(x: object) -> dict[str, Any] | None:
    try:
        found = object.__getattribute__(x, "__dict__")
    except AttributeError:
        return None
    return found if is_a(found, dict) else None


def is_data_descriptor(raw: object) -> bool:
    return hasattr(type(raw), "__set__") or hasattr(type(raw), "__delete__")


def _bound(observer: Observer, raw: Any, x: Any, kind: type, name: str, raised: list[AttributeError]) -> Any:
    """What a class's entry gives for an instance."""
    if type(raw) is FIELD and is_a(x, tuple):
        return observer.seen(raw.__get__(x, kind))
    how = observer.lookup(type(raw), "__get__")
    if is_a(how, types.FunctionType):  # a descriptor in Python, also one that is derived from property
        try:
            return call(how, raw, x, kind)
        except AttributeError as error:
            raised.append(error)
            return _by_getattr(observer, x, name, raised)
    if is_a(raw, property):
        if raw.fget is None:
            return MISSING
        try:
            return call(raw.fget, x)
        except AttributeError as error:
            raised.append(error)
            return _by_getattr(observer, x, name, raised)
    if is_a(raw, (types.FunctionType, classmethod, staticmethod, functools._lru_cache_wrapper)):
        return raw.__get__(x, kind)
    if is_a(raw, (types.MemberDescriptorType, types.GetSetDescriptorType)):
        value = _slot(raw, x)
        if name == "__dict__" and observer.is_own(x):
            return observer.own(value)
        if name == "__dict__" or is_a(x, (types.MethodType, types.CodeType)) or observer.follows(x):
            return value
        if not is_a(x, tuple):  # what is in a tuple stays, as with torch's `max(...).indices`
            observer.conditions.question(_slot, (raw, x), value, f"{called(x)}.{name}")
        return observer.seen(value)
    if is_a(raw, (types.MethodDescriptorType, types.WrapperDescriptorType, types.ClassMethodDescriptorType, types.BuiltinFunctionType)):
        return raw.__get__(x, kind) if hasattr(raw, "__get__") else raw
    if not hasattr(type(raw), "__get__") or is_a(raw, FIELD):
        return observer.seen(raw if not hasattr(type(raw), "__get__") else raw.__get__(x, kind))
    if is_a(raw, (torch.nn.Module, type)):
        return raw
    observer.refuse(f"it reads {called(x)}.{name}, a descriptor of class {type(raw).__name__}")
    return getattr(x, name, MISSING)


def _slot(raw: Any, x: Any) -> Any:
    try:
        return raw.__get__(x, type(x))
    except AttributeError:
        return MISSING


def _by_getattr(observer: Observer, x: object, name: str, raised: list[AttributeError]) -> Any:
    how = observer.lookup(type(x), "__getattr__")
    if how is MISSING:
        return MISSING
    if how is _TORCH_MODULE_GETATTR:
        held = vars(x)
        for kind in ("_parameters", "_buffers", "_modules"):
            part = observer.entry(x, held, kind, f"{called(x)}.{kind}")
            if part is not MISSING:
                value = observer.entry(x, part, name, f"{called(x)}.{name}")
                if value is not MISSING:
                    return value
        return MISSING
    if is_a(how, types.FunctionType):
        try:
            return call(how, x, name)
        except AttributeError as error:
            raised.append(error)
            return MISSING
    observer.refuse(f"it reads {called(x)}.{name} through {how!r}")
    return getattr(x, name, MISSING)


def _of_python_module(observer: Observer, x: Any, name: str) -> Any:
    label = f"{x.__name__}.{name}"
    held = vars(x)
    if x.__name__.startswith("torch.backends"):  # settings of torch's, some behind properties
        value = getattr(x, name, MISSING)
        observer.conditions.question(getattr, (x, name, MISSING), value, label)
        return value
    if type(x) is not types.ModuleType and observer.lookup(type(x), name) is not MISSING:
        return standard(observer, x, name, [])
    value = observer.entry(held, held, name, label)
    if value is MISSING:
        value = getattr(x, name, MISSING)
        if name.startswith("__") or x.__name__.split(".")[0] == "torch":  # torch.ops and the like make their entries when they are asked
            return value
        observer.refuse(f"it reads {label}, which the module makes when it is asked for", lasting=False)
    return value


def _of_class(observer: Observer, x: type, name: str) -> Any:
    meta = type(x)
    if name in ("__name__", "__qualname__", "__module__", "__mro__", "__class__", "__doc__"):
        return getattr(x, name, MISSING)
    above = observer.lookup(meta, name)
    if above is not MISSING and is_data_descriptor(above) and not is_a(above, types.GetSetDescriptorType):
        observer.refuse(f"it reads {x.__name__}.{name} through its metaclass {meta.__name__}")
    raw = observer.lookup(x, name)
    if raw is MISSING and above is MISSING:
        if observer.lookup(meta, "__getattr__") is not MISSING:
            observer.refuse(f"it reads {x.__name__}.{name} through its metaclass {meta.__name__}")
        return getattr(x, name, MISSING)
    value = getattr(x, name, MISSING)
    if raw is not MISSING and is_a(raw, (types.FunctionType, staticmethod, classmethod, property)):
        return value
    if raw is not MISSING and raw is not value and hasattr(type(raw), "__get__") and not unchanging(raw) and not unchanging(value):
        observer.refuse(f"it reads {x.__name__}.{name}, a descriptor of class {type(raw).__name__}")
    return observer.seen(value)


def _of_super(observer: Observer, x: Any, name: str) -> Any:
    instance, start = x.__self__, x.__self_class__.__mro__
    after = start[start.index(x.__thisclass__) + 1 :]
    observer.conditions.order(x.__self_class__)
    for base in after:
        value = vars(base).get(name, MISSING)
        observer.conditions.class_entry(base, name, value)
        if value is not MISSING:
            if type(value) is property and value.fget is not None:
                return call(value.fget, instance)
            return observer.seen(getattr(x, name))
    return MISSING
