"""What instrumented code (`instrument`) does in the places of attribute reads, items, operators, calls and writes.

Each probe does what the statement did and tells the thread's `Observer`, if there is one; without one it does just that. The rules of Python's data model are
spelled out here where they decide what is read: attribute look-up through classes, instances and `__getattr__`; who is asked by an operator.
"""

from __future__ import annotations

import collections
import contextlib
import enum
import functools
import operator
import os
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch

from torch_bridge.guards.conditions import MISSING
from torch_bridge.guards.libraries import is_library
from torch_bridge.guards.observer import ACTIVE, Observer
from torch_bridge.guards.values import is_a, unchanging
from torch_bridge.recorder.tensor import XLATensor

_BUILTIN = (list, dict, set, collections.deque, collections.OrderedDict, collections.defaultdict, bytearray)
_TORCH_MODULE_GETATTR = torch.nn.Module.__getattr__
_EMPTY: tuple[Any, ...] = ([], (), {}, "", set(), range(0), {}.values(), {}.items(), collections.deque())
_DICTS: tuple[dict[Any, Any], ...] = ({}, collections.OrderedDict())
_REVERSIBLE: tuple[Any, ...] = ([], (), {}, {}.values(), {}.items(), range(0), collections.deque())
_ITERATORS = (
    types.GeneratorType,
    *(type(iter(x)) for x in _EMPTY),
    *(type(reversed(x)) for x in _REVERSIBLE),
    *(zip, map, filter, enumerate),
)
_VIEWS = (
    types.MappingProxyType,
    *(type(view) for made in _DICTS for view in (made.keys(), made.values(), made.items())),
)


# -- attributes ---------------------------------------------------------------------------------------


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
        return _of_tensor(observer, x, name)
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
        observer.refuse(f"it reads {_called(x)}.{name}, which is kept in a way of its own")
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
    if raw is not MISSING and _is_data_descriptor(raw):
        return _bound(observer, raw, x, kind, name, raised)
    held = _dict_of(x)
    if held is not None:
        value = observer.entry(x, held, name, f"{_called(x)}.{name}")
        if value is not MISSING:
            return value
    if raw is not MISSING:
        return _bound(observer, raw, x, kind, name, raised)
    return _by_getattr(observer, x, name, raised) if fall_back else MISSING


_TUPLE_GETTER: Any = type(vars(collections.namedtuple("_TUPLE_GETTER", "a"))["a"])
_CLASS = vars(object)["__class__"]


def _called(x: object) -> str:
    return type(x).__name__


def _dict_of(x: object) -> dict[str, Any] | None:
    try:
        found = object.__getattribute__(x, "__dict__")
    except AttributeError:
        return None
    return found if is_a(found, dict) else None


def _is_data_descriptor(raw: object) -> bool:
    return hasattr(type(raw), "__set__") or hasattr(type(raw), "__delete__")


def _bound(observer: Observer, raw: Any, x: Any, kind: type, name: str, raised: list[AttributeError]) -> Any:
    """What a class's entry gives for an instance."""
    if type(raw) is _TUPLE_GETTER and is_a(x, tuple):
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
            observer.conditions.question(_slot, (raw, x), value, f"{_called(x)}.{name}")
        return observer.seen(value)
    if is_a(raw, (types.MethodDescriptorType, types.WrapperDescriptorType, types.ClassMethodDescriptorType, types.BuiltinFunctionType)):
        return raw.__get__(x, kind) if hasattr(raw, "__get__") else raw
    if not hasattr(type(raw), "__get__") or is_a(raw, _FIELD):
        return observer.seen(raw if not hasattr(type(raw), "__get__") else raw.__get__(x, kind))
    if is_a(raw, (torch.nn.Module, type)):
        return raw
    observer.refuse(f"it reads {_called(x)}.{name}, a descriptor of class {type(raw).__name__}")
    return getattr(x, name, MISSING)


_FIELD = type(vars(collections.namedtuple("_Pair", "a b"))["a"])
"""How a field of a named tuple is read."""


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
            part = observer.entry(x, held, kind, f"{_called(x)}.{kind}")
            if part is not MISSING:
                value = observer.entry(x, part, name, f"{_called(x)}.{name}")
                if value is not MISSING:
                    return value
        return MISSING
    if is_a(how, types.FunctionType):
        try:
            return call(how, x, name)
        except AttributeError as error:
            raised.append(error)
            return MISSING
    observer.refuse(f"it reads {_called(x)}.{name} through {how!r}")
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
    if above is not MISSING and _is_data_descriptor(above) and not is_a(above, types.GetSetDescriptorType):
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


_TENSOR_FACTS = frozenset(
    [
        "shape",
        "dtype",
        "device",
        "ndim",
        "requires_grad",
        "T",
        "mT",
        "H",
        "mH",
        "real",
        "imag",
        "layout",
        "itemsize",
        "nbytes",
        "is_sparse",
        "is_cuda",
        "is_cpu",
        "is_xla",
        "is_meta",
        "is_quantized",
        "is_mkldnn",
        "is_nested",
        "is_mps",
        "is_xpu",
        "is_ipu",
        "is_vulkan",
        "data",
        "names",
        "__class__",
        "__name__",
        "is_leaf_",
        "is_mtia",
        "is_maia",
        "is_hpu",
    ]
)
_TENSOR_HIDES = {
    "grad_fn": "how a tensor was computed (.grad_fn)",
    "is_leaf": "how a tensor was computed (.is_leaf)",
    "_version": "how often a tensor was written (._version)",
    "grad": ".grad of a tensor",
    "_grad": ".grad of a tensor",
    "output_nr": "how a tensor was computed (.output_nr)",
    "_backward_hooks": "the hooks of a tensor",
    "retains_grad": "whether a tensor retains its gradient",
    "_base": "what a tensor is a view of (._base)",
    "__dict__": "the attributes of a tensor",
    "_is_param": "whether a tensor is a parameter",
}


def _of_tensor(observer: Observer, x: torch.Tensor, name: str) -> Any:
    if name in _TENSOR_FACTS:
        return getattr(x, name)
    if name in _TENSOR_HIDES:
        observer.refuse(f"it looks at {_TENSOR_HIDES[name]}")
        return getattr(x, name, MISSING)
    if hasattr(torch._C.TensorBase, name) or hasattr(torch.Tensor, name):
        observer.lookup(torch.Tensor, name)
        return getattr(x, name)
    if is_a(x, XLATensor) and not observer.conditions.has_tensor(x):  # made by the run, or an argument, which has no attributes (`replay`)
        return getattr(x, name, MISSING)
    held = vars(x)
    value = observer.entry(x, held, name, f"an attribute {name} of a tensor")
    return getattr(x, name, MISSING) if value is MISSING else value


def set_attribute(value: object, x: object, name: str) -> None:
    """`x.name = value`."""
    observer = ACTIVE.observer
    if observer is None or observer.reason:
        return setattr(x, name, value)
    if is_a(x, (torch.Tensor, type, types.ModuleType)):
        observer.effect(f"it sets {getattr(x, '__name__', 'a tensor')}.{name}")
        return setattr(x, name, value)
    how = observer.lookup(type(x), "__setattr__")
    if is_a(how, types.FunctionType) and how is not torch.nn.Module.__setattr__:
        call(how, x, name, value)
        return None
    return store(observer, x, name, lambda: setattr(x, name, value))


def store(observer: Observer, x: object, name: str, do: Callable[[], None]) -> None:
    """Set or delete an attribute, and note what it was."""
    raw = observer.lookup(type(x), name)
    if name in ("__dict__", "__class__"):
        observer.effect(f"it sets {_called(x)}.{name}")
        return do()
    if raw is not MISSING and _is_data_descriptor(raw):
        if (is_a(raw, property) and raw.fset is not None) or not observer.is_own(x):
            observer.effect(f"it sets {_called(x)}.{name}")
        return do()
    held = _dict_of(x)
    if held is None:
        if not observer.is_own(x):
            observer.effect(f"it sets {_called(x)}.{name}")
        return do()
    if is_a(x, torch.nn.Module) and not observer.is_own(x):
        for kind in ("_parameters", "_buffers", "_modules"):
            part = held.get(kind)
            if is_a(part, dict):
                observer.writes(x, part, name, f"{_called(x)}.{name}")
    observer.writes(x, held, name, f"{_called(x)}.{name}")
    return do()


def delete_attribute(x: object, name: str) -> None:
    """`del x.name`."""
    observer = ACTIVE.observer
    if observer is None or observer.reason:
        return delattr(x, name)
    how = observer.lookup(type(x), "__delattr__") if not is_a(x, (torch.Tensor, type, types.ModuleType)) else None
    if how is None or (is_a(how, types.FunctionType) and how is not torch.nn.Module.__delattr__):
        observer.effect(f"it deletes {_called(x)}.{name}")
        return delattr(x, name)
    return store(observer, x, name, lambda: delattr(x, name))


def attribute_before(x: object, name: str) -> tuple[Any, str, Any]:
    """The left of `x.name += value`, which is read before the right."""
    return x, name, attribute(x, name)


def update_attribute(x: object, name: str, before: object, op: str, value: object) -> None:
    """`x.name += value` and the like."""
    set_attribute(update(before, op, value), x, name)


# -- items --------------------------------------------------------------------------------------------


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
    if kind in _BUILTIN and (observer.is_own(x) or observer.is_given(x)):
        hashed(key)
        return observer.own(x[key]) if is_a(key, slice) else x[key]
    if is_a(x, dict) and observer.lookup(kind, "__getitem__") in _DICT_GETITEMS:
        hashed(key)
        if observer.reason:
            return x[key]
        value = observer.entry(x, x, key, f"[{_key(key)}] of a {kind.__name__}")
        if value is MISSING and observer.lookup(kind, "__missing__") is not MISSING:
            observer.effect(f"it adds to a {kind.__name__}")
        return x[key] if value is MISSING else value
    if kind in _BUILTIN:
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


def _key(key: object) -> str:
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
                observer.writes(x, x, key, f"[{_key(key)}] of a dict")
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
            observer.writes(x, x, key, f"[{_key(key)}] of a dict")
        else:
            observer.effect(f"it changes a {type(x).__name__}")
    del x[key]


def item_before(x: object, key: object) -> tuple[Any, Any, Any]:
    """The left of `x[key] += value`, which is read before the right."""
    return x, key, item(x, key)


def update_item(x: object, key: object, before: object, op: str, value: object) -> None:
    """`x[key] += value` and the like."""
    set_item(update(before, op, value), x, key)


def update(x: Any, op: str, value: object) -> Any:
    """The new value of a name in `x += value` and the like."""
    observer = ACTIVE.observer
    if observer is not None and not observer.reason:
        how = MISSING if is_a(x, torch.Tensor) else observer.lookup(type(x), f"__{op}__")
        if is_a(how, types.FunctionType):
            found = call(how, x, value)
            if found is not NotImplemented:
                return found
            observer.refuse(f"it applies an operator to a {type(x).__name__}")
            return _OPERATOR[op](x, value)
        operand(value)
        if is_a(x, torch.Tensor):
            if not observer.may_write_host(x):
                observer.refuse("it writes into a CPU tensor that was there before")
        elif is_a(x, np.ndarray) or type(x) in _BUILTIN:
            if not observer.is_own(x):
                observer.effect(f"it changes a {type(x).__name__}")
        else:
            operand(x)
    return getattr(operator, op)(x, value)


_OPERATOR: dict[str, Callable[[Any, Any], Any]] = {
    "iadd": operator.add,
    "isub": operator.sub,
    "imul": operator.mul,
    "itruediv": operator.truediv,
    "ifloordiv": operator.floordiv,
    "imod": operator.mod,
    "ipow": operator.pow,
    "imatmul": operator.matmul,
    "ilshift": operator.lshift,
    "irshift": operator.rshift,
    "ior": operator.or_,
    "ixor": operator.xor,
    "iand": operator.and_,
}


# -- operators ----------------------------------------------------------------------------------------


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


def formatted(x: object) -> Any:
    """A value in an f-string."""
    observer = ACTIVE.observer
    if observer is not None and not observer.reason and is_a(x, torch.Tensor):
        observer.refuse("it prints a tensor")
    if is_a(x, (types.FunctionType, type)):
        return x
    return _operand(x, "prints")


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
    if is_a(x, (*_BUILTIN, tuple)) and type(x) in (*_BUILTIN, tuple):
        observer.elements(x)
        _check_elements(observer, x, doing)
    elif is_a(x, np.ndarray):
        observer.array(x)
    elif (
        is_a(x, np.generic)
        or (type(x) in _VIEWS and observer.is_own(x))
        or is_a(x, (torch.SymInt, torch.SymFloat, torch.SymBool))
        or (is_a(x, tuple) and not _in_python(observer, x, _OPERATORS))
    ):
        pass
    else:
        observer.refuse(f"it {doing} a {type(x).__name__}")
    return x


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


def _in_python(observer: Observer, x: object, names: tuple[str, ...]) -> bool:
    return any(is_a(observer.lookup(type(x), name), types.FunctionType) for name in names)


def _check_elements(observer: Observer, x: Any, doing: str) -> None:
    for y in x:
        if not unchanging(y) and not is_a(y, (torch.Tensor, *_BUILTIN, tuple)) and not _compares_by_identity(observer, y):
            observer.refuse(f"it {doing} a {type(x).__name__} with a {type(y).__name__} in it")


def truth(x: Any) -> bool:
    """Whether a condition is true."""
    observer = ACTIVE.observer
    if observer is None or observer.reason:
        return bool(x)
    kind = type(x)
    if (unchanging(x) and not is_a(x, type)) or is_a(x, torch.Tensor):
        return bool(x)
    if kind in (*_BUILTIN, tuple) and not is_a(x, tuple):
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


def container(x: Any) -> Any:
    """What is on the right of `in`."""
    observer = ACTIVE.observer
    if observer is None or observer.reason or (unchanging(x) and not is_a(x, type)) or is_a(x, torch.Tensor):
        return x
    kind = type(x)
    if is_a(x, os._Environ):
        return _Variables(observer, x)
    if kind in (*_BUILTIN, tuple):
        if is_a(x, dict):
            return x if observer.follows(x) else _Keys(observer, x)
        observer.elements(x)
        _check_elements(observer, x, "searches")
        return x
    if is_a(x, type):
        if not issubclass(kind, type(enum.Enum)):
            observer.refuse(f"it searches the class {x.__name__}")
        return x
    how = observer.lookup(kind, "__contains__")
    if is_a(how, types.FunctionType):
        return _Contains(how, x)
    if (kind in _VIEWS or is_a(x, _ITERATORS)) and observer.is_own(x):
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
            self._observer.entry(self._x, self._x, key, f"[{_key(key)}] of a {type(self._x).__name__}")
        return key in self._x


def iterate(x: Any) -> Any:
    """What is gone through: `for`, `*x`, unpacking."""
    observer = ACTIVE.observer
    if observer is None or observer.reason:
        return x
    kind = type(x)
    if is_a(x, torch.Tensor) or kind is tuple or (unchanging(x) and not is_a(x, type)):
        return x
    if is_a(x, _ITERATORS):
        if not observer.is_own(x):
            observer.refuse(f"it takes elements from a {kind.__name__} that was there before, which is an iterator")
        return x
    if kind in _BUILTIN:
        observer.elements(x)
        return x
    if (kind in _VIEWS and observer.is_own(x)) or (is_a(x, tuple) and not _in_python(observer, x, ("__iter__",))):
        return x
    if is_a(x, np.ndarray):
        observer.array(x)
        return x
    how = observer.lookup(kind, "__iter__")
    if is_a(how, types.FunctionType):
        found = call(how, x)
        if not hasattr(type(found), "__next__"):
            raise TypeError(f"iter() returned non-iterator of type '{type(found).__name__}'")
        if not is_a(found, _ITERATORS):
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
    if is_a(x, dict) and not _in_python(observer, x, ("__getitem__", "keys", "__iter__")):
        observer.elements(x) if type(x) in _BUILTIN else observer.refuse(
            f"it takes entries from a {type(x).__name__}"
        ) if not observer.is_own(x) else None
        return x
    keys = attribute(x, "keys")
    return {k: item(x, k) for k in iterate(call(keys))}


def context(x: object) -> Any:
    """What `with` enters."""
    observer = ACTIVE.observer
    if observer is not None and not observer.reason and not _known_context(observer, x):
        observer.refuse(f"it enters a {type(x).__name__}")
    return x


_CONTEXTS = (
    torch.autocast,
    torch.no_grad,
    torch.enable_grad,
    torch.set_grad_enabled,
    torch.autograd.profiler.record_function,
    contextlib.nullcontext,
    contextlib.suppress,
    contextlib._GeneratorContextManager,
    type(threading.Lock()),
    type(threading.RLock()),
)


def _known_context(observer: Observer, x: object) -> bool:
    """Whether entering and leaving it does nothing but what torch's settings say, or what routed code does."""
    kind = type(x)
    if kind is contextlib._GeneratorContextManager:
        return observer.is_own(x)
    return kind in _CONTEXTS or kind.__module__.startswith(("torch_bridge.", "nxd_jax."))


def check_arguments(observer: Observer, args: Iterable[Any], kwargs: dict[str, Any], doing: str) -> None:
    """Arguments of something in C: plain values, tensors, and containers of such; what is in them is noted."""
    for x in (*args, *kwargs.values()):
        _check_argument(observer, x, doing)


def _check_argument(observer: Observer, x: Any, doing: str) -> None:
    if is_a(x, torch.Tensor) or unchanging(x):
        return
    kind = type(x)
    if kind in (*_BUILTIN, tuple):
        observer.elements(x)
        for y in [*x.keys(), *x.values()] if is_a(x, dict) else x:
            _check_argument(observer, y, doing)
    elif is_a(x, np.ndarray):
        observer.array(x)
    elif is_a(x, (*_PASSED, np.generic)) or (is_a(x, (*_ITERATORS, *_VIEWS)) and observer.is_own(x)):
        pass
    elif is_a(x, tuple) and not _in_python(observer, x, ("__iter__", "__len__")):
        for y in x:
            _check_argument(observer, y, doing)
    else:
        observer.refuse(f"it {doing} a {kind.__name__}")


_PASSED = (torch.SymInt, torch.SymFloat, torch.SymBool, slice, torch.Generator, types.FunctionType, types.ModuleType)


def fresh(x: object) -> Any:
    """A list, dict, set or generator that the code has just made."""
    observer = ACTIVE.observer
    return x if observer is None else observer.own(x)


# -- imports and calls --------------------------------------------------------------------------------


def refuse(reason: str) -> None:
    """Nothing may be concluded from this run."""
    observer = ACTIVE.observer
    if observer is not None:
        observer.refuse(reason)


def imported(*names: str) -> None:
    """`import a.b`."""
    observer = ACTIVE.observer
    if observer is None or observer.reason:
        return
    for name in names:
        parts = name.split(".")
        for k in range(1, len(parts) + 1):
            full = ".".join(parts[:k])
            observer.conditions.entry(sys.modules, full, sys.modules.get(full, MISSING), f"sys.modules[{full!r}]")


def imported_from(module: str, *names: str) -> None:
    """`from module import names`."""
    observer = ACTIVE.observer
    if observer is None or observer.reason:
        return
    imported(module)
    space = sys.modules.get(module)
    for name in names:
        if name == "*" or space is None:
            observer.refuse(f"it imports * from {module}")
        elif name in vars(space):
            observer.entry(vars(space), vars(space), name, f"{module}.{name}")
        else:
            imported(f"{module}.{name}")


def call(f: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """`f(*args, **kwargs)`."""
    observer = ACTIVE.observer
    if observer is None or observer.reason:
        return f(*args, **kwargs)
    return observer.caller(observer, f, args, kwargs)
