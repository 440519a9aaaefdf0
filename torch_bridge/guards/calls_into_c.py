"""Calls of methods in C: of strings and numbers, lists and dicts, NumPy. Tables say what depends on nothing but the arguments."""

from __future__ import annotations

import collections
import contextvars
import functools
import re
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from torch_bridge.guards import probes
from torch_bridge.guards.calls_into_torch import PYBIND, c_function, is_torch, tensor_method
from torch_bridge.guards.calls_of_classes import PLAIN_NEW
from torch_bridge.guards.conditions import MISSING
from torch_bridge.guards.observer import Args, Function, Kwargs, Observer, RuleOfType
from torch_bridge.guards.unfollowed import asked_again, opaque
from torch_bridge.guards.values import is_a, unchanging

IN_C: tuple[type, ...] = (
    type(re.compile("").match),  # methods that know their class
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    types.MethodWrapperType,
    types.ClassMethodDescriptorType,
)
_READS_WHOLE: dict[Any, set[str]] = {
    list: {"index", "count", "copy", "__len__", "__iter__", "__contains__", "__eq__"},
    dict: {"items", "keys", "values", "copy", "__len__", "__iter__", "__eq__"},
    collections.OrderedDict: {"items", "keys", "values", "copy", "__len__", "__iter__"},
    collections.defaultdict: {"items", "keys", "values", "copy", "__len__", "__iter__"},
    set: {"copy", "union", "intersection", "difference", "issubset", "issuperset", "isdisjoint", "symmetric_difference", "__contains__"},
    collections.deque: {"index", "count", "copy", "__len__", "__iter__"},
}
_PURE_OWNERS = (
    str,
    bytes,
    int,
    float,
    complex,
    bool,
    tuple,
    frozenset,
    range,
    slice,
    re.Pattern,
    re.Match,
    torch.Size,
    torch.dtype,
    torch.device,
)
_GIVE_NEW = {"copy", "items", "keys", "values", "union", "intersection", "difference", "symmetric_difference", "__iter__"}


def follow_c(observer: Observer, f: Function, args: Args, kwargs: Kwargs) -> Any:
    """A function or method in C, bound or not."""
    of = getattr(f, "__self__", MISSING)
    name = getattr(f, "__name__", "")
    if of is MISSING:  # an unbound method: str.upper
        if is_a(f, (types.MethodDescriptorType, types.WrapperDescriptorType)) and args:
            return _in_c_method(observer, f, args[0], name, args[1:], kwargs, args)
        return opaque(observer, f, args, kwargs)
    if is_a(of, torch.Tensor):
        return tensor_method(observer, f, of, name, args, kwargs)
    if of is None or is_a(of, types.ModuleType) or is_torch(f) or type(of).__module__ == PYBIND:
        return c_function(observer, f, name, args, kwargs)
    return _in_c_method(observer, f, of, name, args, kwargs, None)


def _in_c_method(observer: Observer, f: Any, of: Any, name: str, args: Any, kwargs: Any, full: tuple[Any, ...] | None) -> Any:
    kind = type(of)
    do = (lambda: f(*full, **kwargs)) if full is not None else (lambda: f(*args, **kwargs))
    if is_a(of, torch.Tensor):
        return tensor_method(observer, f, of, name, args, kwargs, do)
    if name == "__getattribute__" and len(args) == 1 and f.__objclass__ is object if hasattr(f, "__objclass__") else False:
        return _plain_getattr(observer, of, args[0], do)
    if name in ("__setattr__", "__delattr__") and not is_a(of, (type, types.ModuleType)):
        return probes.store(observer, of, args[0], do)
    if name == "__init__" and (kind.__init__ is object.__init__ or observer.is_own(of)):
        probes.check_arguments(observer, args, kwargs, f"makes a {kind.__name__} of")
        return do()
    if is_a(of, type):
        return _class_method_in_c(observer, f, of, name, args, kwargs, do)
    if unchanging(of) or is_a(of, _PURE_OWNERS):
        probes.check_arguments(observer, args, kwargs, f"calls {name} with")
        return do()
    builtin = next((b for b in _READS_WHOLE if is_a(of, b) and (kind is b or b in (dict, list, set, collections.OrderedDict))), None)
    if builtin is not None:
        return _container_method(observer, f, of, builtin, name, args, kwargs, do)
    if is_a(of, contextvars.ContextVar):
        return _context_variable(observer, f, of, name, args, kwargs)
    if is_a(of, np.ndarray) or is_a(of, np.generic):
        return _array_method(observer, f, of, name, args, kwargs)
    if is_a(of, torch._C._FunctionBase) and name in _OF_CONTEXTS:
        return do()
    if is_a(f, _NUMPY) or is_a(of, np.ufunc):
        return _numpy(observer, f, args, kwargs)
    if observer.is_own(of) and (is_a(of, (types.GeneratorType, probes.ITERATORS)) or kind in probes.VIEWS):
        return do()
    if name in ("__eq__", "__ne__") and kind.__eq__ is object.__eq__:
        return do()
    return opaque(observer, f, full if full is not None else args, kwargs)


_OF_CONTEXTS = ("save_for_backward", "save_for_forward", "mark_dirty", "mark_non_differentiable", "set_materialize_grads")
_NUMPY = (np.ufunc, type(np.sum))


def _numpy(observer: Observer, f: Any, args: Args, kwargs: Kwargs) -> Any:
    """A function of numpy's: the result is the run's own."""
    if (
        not (getattr(f, "__module__", "") or "numpy").startswith("numpy")
        or "out" in kwargs
        or f in _NUMPY_WRITES
        or (is_a(f, np.ufunc) and len(args) > f.nin)
        or getattr(f, "__name__", "") == "at"
    ):
        return opaque(observer, f, args, kwargs)
    probes.check_arguments(observer, args, kwargs, f"calls numpy.{f.__name__} with")
    found = f(*args, **kwargs)
    views = is_a(found, np.ndarray) and (found.base is not None or any(found is x for x in (*args, *kwargs.values())))
    return found if views else observer.own(found)


_NUMPY_WRITES = (
    np.copyto,
    np.put,
    np.place,
    np.putmask,
    np.fill_diagonal,
    np.put_along_axis,
    np.nan_to_num,
    np.save,
    np.savez,
    np.savez_compressed,
    np.savetxt,
)
"""Functions of numpy's that write into an argument, or a file."""


def _plain_getattr(observer: Observer, of: Any, name: str, do: Callable[[], Any]) -> Any:
    raised: list[AttributeError] = []
    try:
        found = probes.standard(observer, of, name, raised, fall_back=False)
        if found is MISSING and raised:
            raise raised[-1]
        return do() if found is MISSING else found
    finally:
        raised.clear()  # errors know their frames, which know the errors, and tensors


def _class_method_in_c(observer: Observer, f: Any, of: type, name: str, args: Any, kwargs: Any, do: Callable[[], Any]) -> Any:
    if name == "__new__" and args and is_a(args[0], type) and f in PLAIN_NEW:
        return observer.own(do())
    if name in ("fromkeys", "mro", "__subclasses__", "maketrans", "fromhex", "from_bytes") and of in (dict, str, bytes, int, float):
        probes.check_arguments(observer, args, kwargs, f"calls {name} with")
        return observer.own(do())
    return opaque(observer, f, args, kwargs)


def _container_method(
    observer: Observer, f: Any, of: Any, builtin: type, name: str, args: Any, kwargs: Kwargs, do: Callable[[], Any]
) -> Any:
    own = observer.is_own(of)
    if is_a(of, dict) and name in ("get", "__getitem__", "__contains__", "pop", "setdefault") and args:
        probes.hashed(args[0])
        if not own and name in ("get", "__getitem__", "__contains__"):
            observer.entry(of, of, args[0], f"[{probes.key_label(args[0])}] of a {type(of).__name__}")
            return do()
        return do() if own else _changes(observer, of, do)
    if own or name in _READS_WHOLE[builtin]:
        if not own:
            observer.elements(of)
        for x in (*args, *kwargs.values()):
            if name in ("extend", "update", "union", "intersection", "difference", "__init__"):
                probes.merged(x) if is_a(x, dict) else probes.iterate(x)
            elif name in ("sort", "index", "count", "remove"):
                probes.compared(x) if not callable(x) else None
        if name == "sort" and kwargs.get("key") is not None:
            return f(**{**kwargs, "key": callback(observer, kwargs["key"])})
        found = do()
        return observer.own(found) if name in _GIVE_NEW and found is not of else found
    return _changes(observer, of, do)


def _changes(observer: Observer, of: object, do: Callable[[], Any]) -> Any:
    what = " that it was given" if observer.is_given(of) else " that was there before"
    observer.effect(f"it changes a {type(of).__name__}{what}")
    return do()


def _context_variable(observer: Observer, f: Any, of: Any, name: str, args: Args, kwargs: Kwargs) -> Any:
    if name == "get":
        if observer.wrote(of, None):
            return f(*args, **kwargs)
        return asked_again(observer, f, args, kwargs)
    if name in ("set", "reset"):
        observer.conditions.question(of.get, (MISSING,), of.get(MISSING), f"the context variable {of.name}") if not observer.wrote(
            of, None
        ) else None
        observer.writes(of, of, None, f"the context variable {of.name}")
        return observer.own(f(*args, **kwargs))
    return opaque(observer, f, args, kwargs)


def _array_method(observer: Observer, f: Function, of: Any, name: str, args: Args, kwargs: Kwargs) -> Any:
    if is_a(of, np.ndarray):
        observer.array(of)
        if not observer.is_own(of) and name in (
            "fill",
            "sort",
            "put",
            "resize",
            "setfield",
            "setflags",
            "partition",
            "itemset",
            "byteswap",
        ):
            observer.effect("it changes a numpy array")
    if kwargs.get("out") is not None:
        observer.effect("it changes a numpy array")
    probes.check_arguments(observer, args, kwargs, f"calls {name} with")
    return f(*args, **kwargs)


def callback(observer: Observer, f: Function) -> Any:
    """A function to be called from C."""
    return functools.partial(probes.call, f)


BY_TYPE: list[RuleOfType] = [(_NUMPY, _numpy)]
