"""Calls of builtins that need a rule of their own: `getattr`, `len`, `map`, and the like."""

from __future__ import annotations

import collections
import copy
import functools
import itertools
import re
import types
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from torch_bridge.guards import probes
from torch_bridge.guards.calls_into_c import callback
from torch_bridge.guards.conditions import MISSING
from torch_bridge.guards.observer import Args, Function, Kwargs, Observer, Rule, RuleOfType
from torch_bridge.guards.unfollowed import opaque, plainly
from torch_bridge.guards.values import is_a, unchanging


def _getattr(observer: Observer, f: Function, args: Args, kwargs: Kwargs) -> Any:
    x, name, *default = args
    try:
        return probes.attribute(x, name)
    except AttributeError:
        if not default:
            raise
        return default[0]


def _hasattr(observer: Observer, f: Function, args: Args, kwargs: Kwargs) -> bool:
    try:
        probes.attribute(*args)
    except AttributeError:
        return False
    return True


def _setattr(observer: Observer, f: Function, args: Args, kwargs: Kwargs) -> None:
    x, name, value = args
    probes.set_attribute(value, x, name)


def _delattr(observer: Observer, f: Function, args: Args, kwargs: Kwargs) -> None:
    probes.delete_attribute(*args)


def _type(observer: Observer, f: Function, args: Args, kwargs: Kwargs) -> Any:
    if len(args) != 1:
        return opaque(observer, f, args, kwargs)
    if not observer.follows(args[0]) and not is_a(args[0], (types.FunctionType, types.ModuleType, type)):
        observer.conditions.object(args[0])
    if observer.given_parameter(args[0]):
        observer.refuse("it asks for the class of a parameter that it was given")
    return type(args[0])


def _isinstance(observer: Observer, f: Function, args: Args, kwargs: Kwargs) -> Any:
    x, kinds = args
    if observer.given_parameter(x):
        observer.refuse("it asks for the class of a parameter that it was given")
    for kind in kinds if type(kinds) is tuple else (kinds,):
        if is_a(kind, type) and type(kind) is not type and not kind.__module__.startswith("torch"):  # a class that answers for itself
            observer.conditions.question(
                issubclass, (type(x), kind), issubclass(type(x), kind), f"whether a {type(x).__name__} is a {kind.__name__}"
            )
    if not observer.follows(x) and not is_a(x, (types.FunctionType, types.ModuleType, type)):
        observer.conditions.object(x)
    if is_a(observer.lookup(type(x), "__getattribute__"), types.FunctionType):
        return f is isinstance and any(issubclass(type(x), kind) for kind in (args[1] if type(args[1]) is tuple else (args[1],)))
    return f(*args)


def _len(observer: Observer, f: Function, args: Args, kwargs: Kwargs) -> Any:
    (x,) = args
    kind = type(x)
    if is_a(x, torch.Tensor) or kind is tuple:
        return len(x)
    how = observer.lookup(kind, "__len__")
    if is_a(how, types.FunctionType):
        return observer.caller(observer, how, (x,), {})
    if observer.follows(x):
        return len(x)
    if is_a(x, (list, dict, set, collections.deque, bytearray)):
        observer.conditions.question(len, (x,), len(x), f"the length of a {kind.__name__}")
        return len(x)
    if is_a(x, tuple):
        return len(x)
    if is_a(x, np.ndarray):
        observer.array(x)
        return len(x)
    return opaque(observer, f, args, kwargs)


def _gone_through(observer: Observer, f: Function, args: Any, kwargs: Kwargs) -> Any:
    """`list(x)`, `zip(x, y)` and the like."""
    if f in (sorted, min, max, sum, any, all):
        for x in args:
            if is_a(x, (list, tuple, set)):
                _elements_are_plain(observer, f, x)
    args = [a if unchanging(a) and not is_a(a, type) else probes.merged(a) if f is dict and is_a(a, dict) else _through(f, a) for a in args]
    if callable(kwargs.get("key")):
        kwargs = {**kwargs, "key": callback(observer, kwargs["key"])}
    found = f(*args, **kwargs)
    return found if f in (min, max, sum, any, all) else observer.own(found)


def _through(f: Function, x: Any) -> Any:
    if f in (min, max) and (is_a(x, torch.Tensor) or not hasattr(type(x), "__iter__")):
        return probes.operand(x)
    return probes.iterate(x)


def _elements_are_plain(observer: Observer, f: Function, x: Any) -> None:
    for y in x:
        if not unchanging(y) and not is_a(y, (torch.Tensor, list, tuple, dict, torch.SymInt, torch.SymFloat)):
            observer.refuse(f"{f.__name__} of a {type(x).__name__} with a {type(y).__name__} in it")


def _mapped(observer: Observer, f: Function, args: Args, kwargs: Kwargs) -> Any:
    function, *rest = args
    if function is not None:
        function = callback(observer, function)
    return observer.own(f(function, *map(probes.iterate, rest), **kwargs))


def _reduced(observer: Observer, f: Function, args: Args, kwargs: Kwargs) -> Any:
    """`functools.reduce`."""
    function, x, *start = args
    return f(callback(observer, function), probes.iterate(x), *start)


def _iter(observer: Observer, f: Function, args: Args, kwargs: Kwargs) -> Any:
    if len(args) != 1:
        return opaque(observer, f, args, kwargs)
    return observer.own(iter(probes.iterate(args[0])))


def _next(observer: Observer, f: Function, args: Args, kwargs: Kwargs) -> Any:
    if not observer.is_own(args[0]):
        observer.refuse(f"it takes an element from a {type(args[0]).__name__} that was there before, which is an iterator")
    return observer.seen(f(*args))


def _number(observer: Observer, f: Function, args: Args, kwargs: Kwargs) -> Any:
    """`int(x)`, `str(x)`, `range(n)`."""
    for x in (*args, *kwargs.values()):
        if is_a(x, torch.Tensor):
            if f in (str, repr) or (f is format and x.dim()):
                observer.refuse("it prints a tensor")
        elif is_a(x, np.ndarray):
            observer.array(x)
        elif not is_a(x, (types.FunctionType, type)):
            probes.operand(x)
    return f(*args, **kwargs)


def _bool(observer: Observer, f: Function, args: Args, kwargs: Kwargs) -> Any:
    return probes.truth(args[0]) if args else False


def _tuple(observer: Observer, f: Function, args: Args, kwargs: Kwargs) -> Any:
    return f(*[probes.iterate(a) for a in args])


def _object(observer: Observer, f: Function, args: Args, kwargs: Kwargs) -> Any:
    return observer.own(f(*args, **kwargs))


def _partial(observer: Observer, f: Function, args: Args, kwargs: Kwargs) -> Any:
    return observer.own(f(*args, **kwargs))


def _call_partial(observer: Observer, f: functools.partial[Any], args: Args, kwargs: Kwargs) -> Any:
    if type(f) is not functools.partial:
        return opaque(observer, f, args, kwargs)
    if not observer.is_own(f):
        observer.conditions.question(_parts, (f,), _parts(f), "a functools.partial")
        for x in (*f.args, *f.keywords.values()):
            observer.seen(x)
    return observer.caller(observer, f.func, (*f.args, *args), {**f.keywords, **kwargs})


def _parts(f: functools.partial[Any]) -> Any:
    return (f.func, f.args, *f.keywords, *f.keywords.values())


def _deep_copy(observer: Observer, f: Function, args: Args, kwargs: Kwargs) -> Any:
    """`copy.deepcopy` of lists, dicts and plain objects: everything in them is read, and the copies are the run's own."""
    if len(args) != 1 or kwargs:
        return opaque(observer, f, args, kwargs)
    with observer.unwatched():
        _all_of(observer, args[0], {}, _note)
        found = f(args[0])
        _all_of(observer, found, {}, lambda observer, x: observer.own(x))
    return found


def _copy(observer: Observer, f: Function, args: Args, kwargs: Kwargs) -> Any:
    """`copy.copy` of a list, a dict or a plain object (transformers' models copy their configs): it is read, and the copy is the run's own."""
    if len(args) != 1 or kwargs:
        return opaque(observer, f, args, kwargs)
    (x,) = args
    if is_a(x, torch.Tensor) or not (type(x) in _COPIED or (type(x).__dictoffset__ and not is_a(x, _NOT_COPIED))):
        return opaque(observer, f, args, kwargs)
    with observer.unwatched():
        _note(observer, x, "__copy__")
        found = f(x)
    return observer.own(found)


_COPIED = (list, dict, set, collections.OrderedDict, collections.deque)
_NOT_COPIED = (torch.nn.Module, types.ModuleType, types.FunctionType, type, list, dict, set, tuple, collections.deque, np.ndarray)


def _note(observer: Observer, x: object, how: str = "__deepcopy__") -> None:
    """Everything that is in something that is copied. how: the method with which its class would copy it itself."""
    if is_a(x, (list, dict, set, collections.deque)):
        observer.elements(x)
    elif not observer.is_own(x):
        if observer.lookup(type(x), how) is not MISSING or not all(observer.lookup(type(x), name) is plain for name, plain in _AS_OBJECTS):
            observer.refuse(f"it copies a {type(x).__name__}")
        observer.conditions.object(x)
        observer.elements(object.__getattribute__(x, "__dict__"), f"the attributes of a {type(x).__name__}")


_AS_OBJECTS = [
    (name, getattr(object, name, MISSING))
    for name in (
        "__reduce_ex__",
        "__reduce__",
        "__new__",
        "__getstate__",
        "__setstate__",
        "__getnewargs__",
        "__getnewargs_ex__",
        "__slots__",
    )
]
"""How the classes of objects that are copied make copies: as `object` does it, with what is in `__dict__`."""


def _all_of(observer: Observer, x: Any, seen: dict[int, Any], do: Callable[[Observer, Any], Any]) -> None:
    if id(x) in seen or unchanging(x):
        return
    seen[id(x)] = x
    parts: Any = ()
    if is_a(x, dict):
        parts = [*x.keys(), *x.values()]
    elif is_a(x, (list, tuple, set)):
        parts = x
    elif type(x).__dictoffset__ and not is_a(x, (torch.Tensor, torch.nn.Module, types.ModuleType, types.FunctionType)):
        parts = list(object.__getattribute__(x, "__dict__").values())
    else:
        observer.refuse(f"it copies a {type(x).__name__}")
        return
    if not is_a(x, tuple):
        do(observer, x)
    for part in parts:
        _all_of(observer, part, seen, do)


def _weak_reference(observer: Observer, f: weakref.ref[Any], args: Args, kwargs: Kwargs) -> Any:
    """`ref()`. What is gone stays gone. A tensor that was read elsewhere, too, lives as long as that place holds it, which is a condition already.

    Conditions on anything else would keep it alive themselves.
    """
    found = f(*args, **kwargs)
    if type(f) is weakref.ref and (found is None or (is_a(found, torch.Tensor) and observer.conditions.has_tensor(found))):
        return found
    return opaque(observer, f, args, kwargs)


def _with_arguments(rule: Callable[..., Any], *numbers: int) -> Callable[..., Any]:
    """The rule for calls with so many arguments; what is wrong with others, the function says itself."""
    names = rule in (_partial, _mapped)

    def checked(observer: Observer, f: Function, args: Args, kwargs: Kwargs) -> Any:
        if len(args) not in numbers or (kwargs and not names):
            return opaque(observer, f, args, kwargs)
        return rule(observer, f, args, kwargs)

    return checked


def _isinstance_of_call(observer: Observer, f: Function, args: Args, kwargs: Kwargs) -> Any:
    _type(observer, type, args, {})
    observer.lookup(type(args[0]), "__call__")
    return f(*args)


def _object_of_iterables(observer: Observer, f: Function, args: Any, kwargs: Kwargs) -> Any:
    args = [a if unchanging(a) or f is itertools.repeat else probes.iterate(a) for a in args]
    return observer.own(f(*args, **kwargs))


RULES: list[Rule] = [
    (_with_arguments(_getattr, 2, 3), [getattr]),
    (_with_arguments(_hasattr, 2), [hasattr]),
    (_with_arguments(_setattr, 3), [setattr]),
    (_with_arguments(_delattr, 2), [delattr]),
    (_type, [type]),
    (_with_arguments(_isinstance, 2), [isinstance]),
    (_with_arguments(_isinstance_of_call, 1), [callable]),
    (_with_arguments(_len, 1), [len]),
    (_iter, [iter]),
    (_with_arguments(_next, 1, 2), [next]),
    (_with_arguments(_bool, 0, 1), [bool]),
    (_with_arguments(_partial, *range(1, 100)), [functools.partial]),
    (_with_arguments(_mapped, *range(2, 100)), [map]),
    (_with_arguments(_mapped, 2), [filter]),
    (_with_arguments(_reduced, 2, 3), [functools.reduce]),
    (_with_arguments(_tuple, 0, 1), [tuple]),
    (_object, [object, weakref.ref]),
    (_deep_copy, [copy.deepcopy]),
    (_copy, [copy.copy]),
    (_gone_through, [list, set, frozenset, dict, zip, enumerate, sorted, reversed, min, max, sum, any, all]),
    (_gone_through, [collections.deque, collections.OrderedDict]),
    (_object_of_iterables, [itertools.chain, itertools.islice, itertools.product, itertools.zip_longest, itertools.repeat]),
    (_number, [int, float, complex, str, bytes, range, abs, round, divmod, pow, repr, format, hash]),
    (
        plainly,
        [issubclass, super, slice, *([re._compile] if hasattr(re, "_compile") else [])],
    ),  # a pattern for a string, from a cache or new
]
BY_TYPE: list[RuleOfType] = [(functools.partial, _call_partial), (weakref.ref, _weak_reference)]
