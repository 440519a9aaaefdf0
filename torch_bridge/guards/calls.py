"""Calls made by instrumented code: into Python functions, which are instrumented in turn (`calls_of_functions`); into C, where a table says what depends on
nothing but the arguments (`calls_into_c`, `calls_into_torch`); into modules, classes, builtins. Everything else ends the conclusions (`unfollowed`), and is
called as it is."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch

from torch_bridge.guards import calls_into_c, calls_into_torch, calls_of_builtins, calls_of_classes, calls_of_functions, calls_of_modules
from torch_bridge.guards.observer import Args, Kwargs, Observer, run
from torch_bridge.guards.unfollowed import is_ours, opaque
from torch_bridge.guards.values import is_a

__all__ = ["add_rule", "call", "run"]


def call(observer: Observer, f: Any, args: Args, kwargs: Kwargs) -> Any:
    """`f(*args, **kwargs)`, with what decides it noted."""
    if observer.reason:
        return f(*args, **kwargs)
    rule = _RULES.get(id(f)) if not is_a(f, types.MethodType) else None
    if rule is not None:
        return rule(observer, f, args, kwargs)
    kind = type(f)
    if kind is types.FunctionType and _stands_for(f) is not None:
        return _stands_for(f)(observer, f, args, kwargs)
    if f is calls_of_modules.MODULE_CALL[0] and args and is_a(args[0], torch.nn.Module):
        return calls_of_modules.follow_call_of_module(observer, args[0], args[1:], kwargs)
    if kind is types.FunctionType:
        return calls_of_functions.follow_function(observer, f, args, kwargs)
    if kind is types.MethodType:
        return calls_of_functions.follow_method(observer, f, args, kwargs)
    if is_a(f, torch.nn.Module):
        return calls_of_modules.follow_module(observer, f, args, kwargs)
    if is_a(f, type):
        return calls_of_classes.follow_class(observer, f, args, kwargs)
    if kind in calls_into_c.IN_C:
        return calls_into_c.follow_c(observer, f, args, kwargs)
    for of, how in _BY_TYPE:
        if is_a(f, of):
            return how(observer, f, args, kwargs)
    how = observer.lookup(kind, "__call__")
    if is_a(how, types.FunctionType):
        if not observer.is_own(f):
            observer.conditions.object(f)
        return call(observer, how, (f, *args), kwargs)
    return opaque(observer, f, args, kwargs)


def _stands_for(f: types.FunctionType) -> Any:
    """The rule of a builtin in whose place this project has put a function of its own, for numbers that differ by rank; None for other functions."""
    wrapped = getattr(f, "__wrapped__", None)
    if wrapped is None or not is_ours(f):
        return None
    return _RULES.get(id(wrapped))


_FAMILIES = (calls_of_builtins, calls_of_functions, calls_into_torch)
_RULES = {id(f): rule for family in _FAMILIES for rule, functions in family.RULES for f in functions}
_BY_TYPE = [*calls_of_builtins.BY_TYPE, *calls_of_functions.BY_TYPE, *calls_into_torch.BY_TYPE, *calls_into_c.BY_TYPE]


def add_rule(kind: type, rule: Callable[..., Any]) -> None:
    """Calls of objects of a class: rule(observer, object, args, kwargs)."""
    _BY_TYPE.append((kind, rule))
