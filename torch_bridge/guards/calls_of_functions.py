"""Calls of functions in Python, which are instrumented in turn: plain ones, methods, autograd functions, cached ones, loggers."""

from __future__ import annotations

import functools
import inspect
import logging
import os
import types
from typing import Any

import numpy as np
import torch

from torch_bridge.guards import probes
from torch_bridge.guards.calls_into_torch import HIDDEN_METHODS
from torch_bridge.guards.conditions import MISSING
from torch_bridge.guards.instrument import ROUTED, code_of, instrumented
from torch_bridge.guards.observer import Args, Function, Kwargs, Observer, Rule, RuleOfType, run
from torch_bridge.guards.routing import CannotInstrument
from torch_bridge.guards.unfollowed import OURS, asked_again, has_objects, is_generated, is_ours, name_of, opaque
from torch_bridge.guards.values import is_a, unchanging
from torch_bridge.recorder.tensor import XLATensor

_PROBES = types.CellType(probes)


def follow_function(observer: Observer, f: types.FunctionType, args: Args, kwargs: Kwargs) -> Any:
    """A function in Python: its instrumented code runs, unless it is one of ours."""
    if f.__code__ in ROUTED:
        return f(*args, **kwargs)
    if is_ours(f) and hasattr(f, "__wrapped__") and not is_ours(f.__wrapped__) and not _of_known_module(f.__wrapped__):
        return opaque(observer, f, args, kwargs)
    if is_ours(f) and not has_objects(args, kwargs):
        for x in (*args, *kwargs.values()):
            observer.elements(x)
            if is_a(x, np.ndarray):
                observer.array(x)
        return f(*args, **kwargs)
    if f.__name__ == "mark_static_address" and f.__module__ == "torch._dynamo.decorators" and args and is_a(args[0], XLATensor):
        return f(*args, **kwargs)  # a mark for CUDA graphs, which no xla tensor is part of: transformers' caches of states make it
    try:
        with observer.unwatched():
            code = code_of(f)
            routed = instrumented(f, _PROBES)
    except CannotInstrument as error:
        if observer.watchdog is not None and is_generated(f):
            observer.watchdog.allowed.add(f.__code__)
            return f(*args, **kwargs)
        return opaque(observer, f, args, kwargs, str(error))
    observer.function(f, code.names)
    found = routed(*args, **kwargs)
    return observer.own(found) if type(found) is types.GeneratorType else found


def _of_known_module(f: Function) -> bool:
    """Whether a function is of a module whose functions depend on their arguments alone."""
    home = f"{getattr(f, '__module__', None) or getattr(getattr(f, '__objclass__', None), '__module__', '')}."
    return home.startswith(("torch.", "numpy.", "math.", "cmath.")) and not home.startswith("numpy.random")


def follow_method(observer: Observer, f: types.MethodType, args: Args, kwargs: Kwargs) -> Any:
    """A bound method: its function with the object, but for those of torch, `os.environ` and loggers that need more."""
    of: Any = f.__self__
    function: Any = f.__func__
    if is_a(of, type) and issubclass(of, torch.autograd.Function) and function is _APPLY:
        return _autograd_function(observer, of, f, args, kwargs)
    if is_a(of, os._Environ) and function.__name__ in ("get", "__getitem__", "__contains__"):
        return asked_again(observer, f, args, kwargs)
    if is_a(of, logging.Logger):
        return _logger(observer, f, args, kwargs)
    if is_a(of, torch.Tensor) and function.__name__ in ("data_ptr", "untyped_storage"):  # xla tensors have their own
        observer.refuse(HIDDEN_METHODS[function.__name__])
        return f(*args, **kwargs)
    if function.__module__ == "torch._dynamo.mutation_guard" and function.__name__ == "tag":
        return f(*args, **kwargs)  # once torch.compile was used, each module that is made is noted
    return observer.caller(observer, function, (of, *args), kwargs)


_APPLY: Any = torch.autograd.Function.apply.__func__  # type: ignore[attr-defined]
_SETUP_CONTEXT = vars(torch.autograd.function._SingleLevelFunction)["setup_context"]


def _autograd_function(observer: Observer, cls: type, f: Any, args: Args, kwargs: Kwargs) -> Any:
    if cls.__module__.startswith((*OURS, "torch.")):
        return f(*args, **kwargs)
    if kwargs or observer.lookup(cls, "setup_context") is not _SETUP_CONTEXT:
        return opaque(observer, f, args, kwargs, "it has setup_context, or keyword arguments")
    forward, backward = (getattr(cls, name) for name in ("forward", "backward"))
    observer.lookup(cls, "forward")
    observer.lookup(cls, "backward")
    backwards = observer.functions.setdefault(cls, [])

    def routed_forward(ctx: Any, *inputs: Any) -> Any:
        observer.own(ctx)
        return observer.caller(observer, forward, (ctx, *inputs), {})

    def routed_backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        new = Observer(observer.caller, grads)
        new.own(ctx)
        backwards.append(new)
        try:
            return run(backward, (ctx, *grads), {}, new)
        finally:
            new.release()

    routed = type(cls.__name__, (cls,), {"forward": staticmethod(routed_forward), "backward": staticmethod(routed_backward)})
    return routed.apply(*args)  # type: ignore[attr-defined]


_LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40, "exception": 40, "critical": 50}


def _logger(observer: Observer, f: Any, args: Args, kwargs: Kwargs) -> Any:
    of, name = f.__self__, f.__func__.__name__
    if is_a(f.__func__, functools._lru_cache_wrapper):  # transformers' warning_once
        return follow_cached(observer, f.__func__, (of, *args), kwargs)
    if name in _LEVELS and not of.isEnabledFor(_LEVELS[name]):
        observer.conditions.question(of.isEnabledFor, (_LEVELS[name],), False, f"whether the logger {of.name} says {name}")
        return f(*args, **kwargs)
    if name in ("isEnabledFor", "getEffectiveLevel"):
        return asked_again(observer, f, args, kwargs)
    return opaque(observer, f, args, kwargs)


def follow_cached(observer: Observer, f: Any, args: Args, kwargs: Kwargs) -> Any:
    """A function under `functools.lru_cache`: what it kept is asked for again."""
    if not all(unchanging(x) or is_a(x, logging.Logger) for x in (*args, *kwargs.values())):
        return opaque(observer, f, args, kwargs)
    if not (f.__module__ or "").startswith(("torch.", "transformers.", "logging")):
        return opaque(observer, f, args, kwargs, "its cache counts who asks")
    before = f.cache_info().misses
    with observer.unwatched():
        found = f(*args, **kwargs)
    if f.cache_info().misses != before:
        observer.refuse(f"it fills the cache of {name_of(f)}", lasting=False)
    ask = functools.partial(f, **kwargs) if kwargs else f
    observer.conditions.question(ask, args, found, f"what {name_of(f)} keeps")
    return observer.seen(found)


def _signature(observer: Observer, f: Function, args: Args, kwargs: Kwargs) -> Any:
    """`inspect.signature` of a function or a method: what it says follows from those that it wraps."""
    of: Any = args[0] if len(args) == 1 and not kwargs else None
    of = getattr(of, "plain", of) if type(of).__module__ == "torch_bridge.replay.player" else of
    inner = getattr(of, "__func__", of) if is_a(of, types.MethodType) else of
    while is_a(inner, types.FunctionType):
        observer.conditions.function(inner)
        observer.entry(inner, vars(inner), "__signature__", "a signature")
        wrapped = observer.entry(inner, vars(inner), "__wrapped__", "what a function wraps")
        if wrapped is MISSING:
            found = inspect.signature(of)
            observer.own(found.parameters)
            return observer.own(found)
        inner = wrapped
    return opaque(observer, f, args, kwargs)


def _bind(observer: Observer, f: Function, args: Args, kwargs: Kwargs) -> Any:
    """`signature.bind(...)`: what it gives follows from the signature's parameters and the arguments."""
    if not args or type(args[0]) is not inspect.Signature:
        return opaque(observer, f, args, kwargs)
    signature: inspect.Signature = args[0]
    if not observer.is_own(signature):
        observer.conditions.question(_parameters, (signature,), _parameters(signature), "a signature")
        for parameter in signature.parameters.values():
            observer.seen(parameter.default)
    found = observer.own(f(*args, **kwargs))
    return _own_arguments(observer, found, (*args, *kwargs.values()))


def _apply_defaults(observer: Observer, f: Function, args: Args, kwargs: Kwargs) -> Any:
    """`bound.apply_defaults()` of what a signature has bound in this run."""
    if not args or type(args[0]) is not inspect.BoundArguments or not observer.is_own(args[0]):
        return opaque(observer, f, args, kwargs)
    before = tuple(args[0].arguments.values())
    f(*args, **kwargs)
    _own_arguments(observer, args[0], (*before, *_defaults(args[0].signature)))


def _own_arguments(observer: Observer, bound: inspect.BoundArguments, given: Args) -> inspect.BoundArguments:
    """Note the dict of arguments, and that of `**kwargs` in it, which are made anew. given: values that were there before."""
    observer.own(bound.arguments)
    for value in bound.arguments.values():
        if type(value) is dict and not any(value is x for x in given):
            observer.own(value)
    return bound


def _parameters(signature: inspect.Signature) -> Args:
    return tuple(signature.parameters.values())


def _defaults(signature: inspect.Signature) -> Args:
    return tuple(parameter.default for parameter in signature.parameters.values())


RULES: list[Rule] = [
    (_signature, [inspect.signature]),
    (_bind, [inspect.Signature.bind, inspect.Signature.bind_partial]),
    (_apply_defaults, [inspect.BoundArguments.apply_defaults]),
]
BY_TYPE: list[RuleOfType] = [(functools._lru_cache_wrapper, follow_cached)]
