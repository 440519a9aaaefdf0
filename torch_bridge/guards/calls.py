"""Calls made by instrumented code: into Python functions, which are instrumented in turn; into C, where a table says what depends on nothing but the arguments;
into modules, classes, partials. Everything else ends the conclusions (`Observer.refuse`), and is called as it is."""

from __future__ import annotations

import collections
import contextvars
import copy
import dataclasses
import enum
import functools
import inspect
import itertools
import logging
import os
import re
import types
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch.utils import checkpoint as checkpoints

from torch_bridge import source
from torch_bridge.guards import allowed_hooks, inference_mode, probes
from torch_bridge.guards.conditions import MISSING
from torch_bridge.guards.instrument import ROUTED, CannotInstrument, code_of, instrumented
from torch_bridge.guards.observer import ACTIVE, Observer
from torch_bridge.guards.values import is_a, unchanging

Function = Callable[..., Any]
Args = tuple[Any, ...]
Kwargs = dict[str, Any]

_OURS = ("torch_bridge.", "nxd_jax.")
_PROBES = types.CellType(probes)


def run(function: Callable[..., Any], args: Args, kwargs: Kwargs, observer: Observer) -> Any:
    """Call a function with everything that it does routed through the observer."""
    from torch_bridge.guards.observer import Watchdog

    before, ACTIVE.observer = ACTIVE.observer, observer
    try:
        with Watchdog(observer) as watchdog:
            observer.watchdog = watchdog
            return call(observer, function, args, kwargs)
    finally:
        ACTIVE.observer = before
        observer.end()


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
    if f is _CALL[0] and args and is_a(args[0], torch.nn.Module):
        return _called(observer, args[0], args[1:], kwargs)
    if kind is types.FunctionType:
        return _function(observer, f, args, kwargs)
    if kind is types.MethodType:
        return _method(observer, f, args, kwargs)
    if is_a(f, torch.nn.Module):
        return _module(observer, f, args, kwargs)
    if is_a(f, type):
        return _instance(observer, f, args, kwargs)
    if kind in _IN_C:
        return _in_c(observer, f, args, kwargs)
    for of, how in _BY_TYPE:
        if is_a(f, of):
            return how(observer, f, args, kwargs)
    how = observer.lookup(kind, "__call__")
    if is_a(how, types.FunctionType):
        if not observer.is_own(f):
            observer.conditions.object(f)
        return call(observer, how, (f, *args), kwargs)
    return _opaque(observer, f, args, kwargs)


def _opaque(observer: Observer, f: Function, args: Args, kwargs: Kwargs, why: str = "") -> Any:
    observer.refuse(f"it calls {_name(f)}" + (f": {why}" if why else ""))
    return f(*args, **kwargs)


def _name(f: Function) -> str:
    name = getattr(f, "__qualname__", None) or getattr(f, "__name__", None)
    module = getattr(f, "__module__", None)
    if name is None:
        return f"a {type(f).__name__}"
    return f"{module}.{name}" if is_a(module, str) and module != "builtins" else str(name)


# -- functions in Python ------------------------------------------------------------------------------


def _function(observer: Observer, f: types.FunctionType, args: Args, kwargs: Kwargs) -> Any:
    if f.__code__ in ROUTED:
        return f(*args, **kwargs)
    if _is_ours(f) and hasattr(f, "__wrapped__") and not _is_ours(f.__wrapped__) and not _of_known_module(f.__wrapped__):
        return _opaque(observer, f, args, kwargs)
    if _is_ours(f) and not _has_objects(args, kwargs):
        for x in (*args, *kwargs.values()):
            observer.elements(x)
            if is_a(x, np.ndarray):
                observer.array(x)
        return f(*args, **kwargs)
    try:
        with observer.unwatched():
            code = code_of(f)
            routed = instrumented(f, _PROBES)
    except CannotInstrument as error:
        if observer.watchdog is not None and _is_generated(f):
            observer.watchdog.allowed.add(f.__code__)
            return f(*args, **kwargs)
        return _opaque(observer, f, args, kwargs, str(error))
    observer.function(f, code.names)
    found = routed(*args, **kwargs)
    return observer.own(found) if type(found) is types.GeneratorType else found


def _is_ours(f: Any) -> bool:
    """Whether a function is this project's, also where it takes the place of another one, whose names it bears."""
    return f"{getattr(f, '__globals__', {}).get('__name__') or ''}.".startswith(_OURS)


def _of_known_module(f: Function) -> bool:
    """Whether a function is of a module whose functions depend on their arguments alone."""
    home = f"{getattr(f, '__module__', None) or getattr(getattr(f, '__objclass__', None), '__module__', '')}."
    return home.startswith(("torch.", "numpy.", "math.", "cmath.")) and not home.startswith("numpy.random")


def _stands_for(f: types.FunctionType) -> Any:
    """The rule of a builtin in whose place this project has put a function of its own, for numbers that differ by rank; None for other functions."""
    wrapped = getattr(f, "__wrapped__", None)
    if wrapped is None or not _is_ours(f):
        return None
    return _RULES.get(id(wrapped))


def _has_objects(args: Args, kwargs: Kwargs) -> bool:
    """Whether there are objects among the arguments whose state a function may read."""
    return any(is_a(x, torch.nn.Module) or (type(x).__dictoffset__ and not _stateless(x)) for x in (*args, *kwargs.values()))


def _stateless(x: object) -> bool:
    """Whether what an object of this project's or torch's holds is not the script's."""
    if is_a(x, (torch.Tensor, type, types.FunctionType, types.ModuleType, enum.Enum)):
        return True
    held = list(object.__getattribute__(x, "__dict__").values())
    return type(x).__module__.startswith((*_OURS, "torch")) and not any(is_a(v, (torch.nn.Module, types.FunctionType)) for v in held)


def _is_generated(f: types.FunctionType) -> bool:
    """Whether `dataclasses` or `collections.namedtuple` wrote it."""
    return f.__code__.co_filename.startswith("<string>") and f.__name__ in ("__init__", "__new__", "__eq__", "__repr__", "__create_fn__")


def _method(observer: Observer, f: types.MethodType, args: Args, kwargs: Kwargs) -> Any:
    of: Any = f.__self__
    function: Any = f.__func__
    if is_a(of, type) and issubclass(of, torch.autograd.Function) and function is _APPLY:
        return _autograd_function(observer, of, f, args, kwargs)
    if is_a(of, os._Environ) and function.__name__ in ("get", "__getitem__", "__contains__"):
        return _asked_again(observer, f, args, kwargs)
    if is_a(of, logging.Logger):
        return _logger(observer, f, args, kwargs)
    if is_a(of, torch.Tensor) and function.__name__ in ("data_ptr", "untyped_storage"):  # xla tensors have their own
        observer.refuse(_HIDDEN_METHODS[function.__name__])
        return f(*args, **kwargs)
    if function.__module__ == "torch._dynamo.mutation_guard" and function.__name__ == "tag":
        return f(*args, **kwargs)  # once torch.compile was used, each module that is made is noted
    return call(observer, function, (of, *args), kwargs)


_APPLY: Any = torch.autograd.Function.apply.__func__  # type: ignore[attr-defined]
_SETUP_CONTEXT = vars(torch.autograd.function._SingleLevelFunction)["setup_context"]


def _autograd_function(observer: Observer, cls: type, f: Any, args: Args, kwargs: Kwargs) -> Any:
    if cls.__module__.startswith((*_OURS, "torch.")):
        return f(*args, **kwargs)
    if kwargs or observer.lookup(cls, "setup_context") is not _SETUP_CONTEXT:
        return _opaque(observer, f, args, kwargs, "it has setup_context, or keyword arguments")
    forward, backward = (getattr(cls, name) for name in ("forward", "backward"))
    observer.lookup(cls, "forward")
    observer.lookup(cls, "backward")
    backwards = observer.functions.setdefault(cls, [])

    def routed_forward(ctx: Any, *inputs: Any) -> Any:
        observer.own(ctx)
        return call(observer, forward, (ctx, *inputs), {})

    def routed_backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        new = Observer(call, grads)
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
        return _cached(observer, f.__func__, (of, *args), kwargs)
    if name in _LEVELS and not of.isEnabledFor(_LEVELS[name]):
        observer.conditions.question(of.isEnabledFor, (_LEVELS[name],), False, f"whether the logger {of.name} says {name}")
        return f(*args, **kwargs)
    if name in ("isEnabledFor", "getEffectiveLevel"):
        return _asked_again(observer, f, args, kwargs)
    return _opaque(observer, f, args, kwargs)


def _asked_again(observer: Observer, f: Function, args: Args, kwargs: Kwargs) -> Any:
    """Something whose answer is asked for again before every call that is played."""
    found = f(*args, **kwargs)
    ask = functools.partial(f, **kwargs) if kwargs else f
    observer.conditions.question(ask, args, found, f"what {_name(f)} says")
    return observer.seen(found)


# -- modules ------------------------------------------------------------------------------------------

_CALL = tuple(
    f if f.__code__.co_filename == torch.nn.modules.module.__file__ else None
    for f in (torch.nn.Module.__call__, torch.nn.Module._call_impl)
)
"""torch's own, if nobody has put something in their places."""
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def _module(observer: Observer, m: torch.nn.Module, args: Args, kwargs: Kwargs) -> Any:
    """`module(...)`: torch's own call, or that of its class."""
    how = observer.lookup(type(m), "__call__")
    if is_a(how, types.FunctionType) and how is not _CALL[0]:
        return call(observer, how, (m, *args), kwargs)
    return _called(observer, m, args, kwargs) if how is _CALL[0] else _opaque(observer, m, args, kwargs)


def _called(observer: Observer, m: torch.nn.Module, args: Args, kwargs: Kwargs) -> Any:
    """`nn.Module.__call__(module, ...)`, which a class's own may call: its hooks, and its forward."""
    if observer.lookup(type(m), "_call_impl") is not _CALL[1] or m._compiled_call_impl is not None:
        return _opaque(observer, m, args, kwargs)
    observer.conditions.object(m)
    hooks = {kind: observer.entry(m, vars(m), kind, kind) for kind in _HOOKS}
    if any(hooks.values()):
        return _with_hooks(observer, m, hooks, args, kwargs)
    for kind, held in hooks.items():
        observer.conditions.elements(held, f"{type(m).__name__}.{kind}")
    return module_frame(m, args, kwargs)


def module_frame(self: torch.nn.Module, args: Args, kwargs: Kwargs) -> Any:
    """In the place of `nn.Module._call_impl` on the stack: `source` knows it, and says in which module an op was called."""
    return probes.call(probes.attribute(self, "forward"), *args, **kwargs)


source.add_module_frame(module_frame.__code__)


def _with_hooks(observer: Observer, m: torch.nn.Module, hooks: dict[str, Any], args: Args, kwargs: Kwargs) -> Any:
    """Forward hooks are code like any other."""
    if hooks["_backward_hooks"] or hooks["_backward_pre_hooks"] or m._forward_hooks_with_kwargs or m._forward_pre_hooks_with_kwargs:
        return _opaque(observer, m, args, kwargs, "it has hooks on its backward pass, or hooks with keyword arguments")
    for kind, held in hooks.items():
        observer.conditions.elements(held, f"{type(m).__name__}.{kind}")
    for hook in list(hooks["_forward_pre_hooks"].values()):
        found = probes.call(hook, m, args)
        if found is not None:
            args = found if is_a(found, tuple) else (found,)
    out = module_frame(m, args, kwargs)
    for hook in list(hooks["_forward_hooks"].values()):
        if allowed_hooks.idle(hook) and not observer.wrote(allowed_hooks.collector(), None):
            continue  # nobody collects around the module (`torch_state.observed`), and nobody inside
        found = probes.call(hook, m, args, out)
        out = out if found is None else found
    return out


# -- classes ------------------------------------------------------------------------------------------


def _instance(observer: Observer, cls: type, args: Args, kwargs: Kwargs) -> Any:
    """A new object."""
    if issubclass(cls, BaseException) or issubclass(cls, enum.Enum):
        return cls(*args, **kwargs)
    meta = type(cls)
    if observer.lookup(meta, "__call__") is not type.__call__:
        return _opaque(observer, cls, args, kwargs)
    if cls.__module__.startswith(_TORCH_CLASSES) and not issubclass(cls, torch.nn.Module):
        probes.check_arguments(observer, args, kwargs, f"makes a {cls.__name__} of")
        return observer.own(cls(*args, **kwargs))
    if observer.lookup(cls, "__del__") is not MISSING:
        observer.refuse(f"it makes a {cls.__name__}, which has a finalizer")
    new, init = observer.lookup(cls, "__new__"), observer.lookup(cls, "__init__")
    if cls.__module__.startswith(_OURS) and not issubclass(cls, torch.nn.Module) and not _has_objects(args, kwargs):
        return observer.own(cls(*args, **kwargs))
    if issubclass(cls, tuple):
        return _named_tuple(observer, cls, args, kwargs)
    if new is not object.__new__ and is_a(new, staticmethod):
        made = call(observer, new.__func__, (cls, *args), kwargs)  # it may be one that was there before
    elif new in _PLAIN_NEW:
        made = observer.own(new(cls))
    else:
        return _opaque(observer, cls, args, kwargs)
    if not is_a(made, cls):
        return made
    if is_a(init, types.FunctionType):
        if _is_generated(init) and dataclasses.is_dataclass(cls):
            return _data_instance(observer, cls, init, made, args, kwargs)
        call(observer, init, (made, *args), kwargs)
    elif init is object.__init__:
        if new is object.__new__ and (args or kwargs):
            return cls(*args, **kwargs)  # it says what is wrong
    elif init in _PLAIN_INIT:
        for x in args:
            probes.iterate(x) if not is_a(x, dict) else probes.merged(x)
        init(made, *args, **kwargs)
    else:
        return _opaque(observer, cls, args, kwargs)
    return made


_PLAIN_NEW = (
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
    return _opaque(observer, cls, args, kwargs)


def _is_named_tuple_code(f: types.FunctionType) -> bool:
    return f.__code__.co_filename.startswith("<string>") or "namedtuple" in f.__code__.co_filename


# -- in C ---------------------------------------------------------------------------------------------

_IN_C = (
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


def _in_c(observer: Observer, f: Function, args: Args, kwargs: Kwargs) -> Any:
    of = getattr(f, "__self__", MISSING)
    name = getattr(f, "__name__", "")
    if of is MISSING:  # an unbound method: str.upper
        if is_a(f, (types.MethodDescriptorType, types.WrapperDescriptorType)) and args:
            return _in_c_method(observer, f, args[0], name, args[1:], kwargs, args)
        return _opaque(observer, f, args, kwargs)
    if is_a(of, torch.Tensor):
        return _tensor_method(observer, f, of, name, args, kwargs)
    if of is None or is_a(of, types.ModuleType) or _is_torch(f) or type(of).__module__ == _PYBIND:
        return _c_function(observer, f, name, args, kwargs)
    return _in_c_method(observer, f, of, name, args, kwargs, None)


def _in_c_method(observer: Observer, f: Any, of: Any, name: str, args: Any, kwargs: Any, full: tuple[Any, ...] | None) -> Any:
    kind = type(of)
    do = (lambda: f(*full, **kwargs)) if full is not None else (lambda: f(*args, **kwargs))
    if is_a(of, torch.Tensor):
        return _tensor_method(observer, f, of, name, args, kwargs, do)
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
    if observer.is_own(of) and (is_a(of, (types.GeneratorType, probes._ITERATORS)) or kind in probes._VIEWS):
        return do()
    if name in ("__eq__", "__ne__") and kind.__eq__ is object.__eq__:
        return do()
    return _opaque(observer, f, full if full is not None else args, kwargs)


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
        return _opaque(observer, f, args, kwargs)
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
    if name == "__new__" and args and is_a(args[0], type) and f in _PLAIN_NEW:
        return observer.own(do())
    if name in ("fromkeys", "mro", "__subclasses__", "maketrans", "fromhex", "from_bytes") and of in (dict, str, bytes, int, float):
        probes.check_arguments(observer, args, kwargs, f"calls {name} with")
        return observer.own(do())
    return _opaque(observer, f, args, kwargs)


def _container_method(
    observer: Observer, f: Any, of: Any, builtin: type, name: str, args: Any, kwargs: Kwargs, do: Callable[[], Any]
) -> Any:
    own = observer.is_own(of)
    if is_a(of, dict) and name in ("get", "__getitem__", "__contains__", "pop", "setdefault") and args:
        probes.hashed(args[0])
        if not own and name in ("get", "__getitem__", "__contains__"):
            observer.entry(of, of, args[0], f"[{probes._key(args[0])}] of a {type(of).__name__}")
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
            return f(**{**kwargs, "key": _callback(observer, kwargs["key"])})
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
        return _asked_again(observer, f, args, kwargs)
    if name in ("set", "reset"):
        observer.conditions.question(of.get, (MISSING,), of.get(MISSING), f"the context variable {of.name}") if not observer.wrote(
            of, None
        ) else None
        observer.writes(of, of, None, f"the context variable {of.name}")
        return observer.own(f(*args, **kwargs))
    return _opaque(observer, f, args, kwargs)


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


# tensors and torch

_TENSOR_METHODS = frozenset(
    [
        "size",
        "dim",
        "numel",
        "nelement",
        "stride",
        "element_size",
        "storage_offset",
        "type",
        "to",
        "cpu",
        "item",
        "tolist",
        "contiguous",
        "is_contiguous",
        "is_floating_point",
        "is_complex",
        "is_signed",
        "is_conj",
        "is_neg",
        "is_inference",
        "detach",
        "detach_",
        "clone",
        "requires_grad_",
        "new_tensor",
        "new_zeros",
        "new_ones",
        "new_full",
        "new_empty",
        "new",
        "float",
        "double",
        "half",
        "bfloat16",
        "int",
        "long",
        "short",
        "char",
        "bool",
        "byte",
        "view",
        "view_as",
        "reshape",
        "reshape_as",
        "expand_as",
        "repeat_interleave",
        "numpy",
        "ndimension",
        "is_same_size",
        "get_device",
        "__len__",
        "__bool__",
        "__int__",
        "__float__",
        "__index__",
        "__getitem__",
        "__setitem__",
        "sym_size",
        "sym_numel",
        "type_as",
        "unflatten",
        "unbind",
        "split",
        "chunk",
        "norm",
        "masked_fill",
        "as_subclass",
        "is_set_to",
        "xpu",
        "has_names",
        "dim_order",
        "data_ptr_",
    ]
)
_HIDDEN_METHODS = {
    "register_post_accumulate_grad_hook": "it registers a hook on a tensor",
    "retain_grad": "it asks for the gradient of a tensor inside",
    "backward": "it runs a backward pass inside",
    "data_ptr": "it looks at the address of a tensor",
    "untyped_storage": "it looks at the storage of a tensor",
    "storage": "it looks at the storage of a tensor",
    "share_memory_": "it shares the memory of a tensor",
    "__repr__": "it prints a tensor",
    "__format__": "it prints a tensor",
    "__str__": "it prints a tensor",
    "__hash__": "it uses a tensor as a key",
    "__reversed__": "",
}


@functools.cache
def _is_aten(name: str) -> bool:
    """Whether there is an op of this name."""
    return any(hasattr(torch.ops.aten, n) for n in {name, name.removeprefix("_"), name.strip("_"), name.removesuffix("_")} if n)


_OF_PLACES = frozenset(
    ["storage_offset", "as_strided", "as_strided_", "as_strided_copy", "as_strided_scatter", "set_", "is_set_to", "is_alias_of"]
)
"""Methods and functions whose results depend on where in memory a tensor starts, and what lies around it."""
_OF_STRIDES = frozenset(["stride", "is_contiguous", "dim_order"])


def _note_memory(observer: Observer, name: str) -> None:
    """Whether something asks how tensors lie in memory."""
    observer.asks_place |= name in _OF_PLACES
    observer.asks_strides |= name in _OF_STRIDES


def _tensor_method(
    observer: Observer, f: Any, of: torch.Tensor, name: str, args: Any, kwargs: Any, do: Callable[[], Any] | None = None
) -> Any:
    do = do or (lambda: f(*args, **kwargs))
    _note_memory(observer, name)
    reason = _HIDDEN_METHODS.get(name) or _asks_for_mode(name)
    if reason:
        observer.refuse(reason)
        return do()
    dunder = name.startswith("__") and name.endswith("__")
    if (
        name not in _TENSOR_METHODS
        and not _is_aten(name)
        and not (dunder and _is_aten(name.strip("_").removeprefix("r").removeprefix("i")))
    ):
        observer.refuse(f"it calls Tensor.{name}")
        return do()
    if (name.endswith("_") and not dunder) or (name.startswith("__i") and name not in ("__invert__", "__int__", "__index__")):
        _check_host_write(observer, (of,))
    _check_out(observer, kwargs)
    probes.check_arguments(observer, args, kwargs, f"calls Tensor.{name} with")
    try:
        return do()
    except RuntimeError:  # `view` says in this way that strides do not fit
        observer.asks_strides = True
        raise


def _asks_for_mode(name: str) -> str:
    """Why a call cannot be followed that asks for inference mode where that is on, as it is left for recordings; "" for others."""
    return "it asks for inference mode" if name in inference_mode.ASKED_BY and inference_mode.on() else ""


def _check_host_write(observer: Observer, tensors: Iterable[Any]) -> None:
    if any(is_a(t, torch.Tensor) and not observer.may_write_host(t) for t in tensors):
        observer.refuse("it writes into a CPU tensor that was there before")


def _check_out(observer: Observer, kwargs: Kwargs) -> None:
    out = kwargs.get("out")
    if out is not None:
        _check_host_write(observer, out if is_a(out, (tuple, list)) else (out,))


def _is_torch(f: Function) -> bool:
    of = getattr(f, "__self__", None)
    return is_a(of, type) and of.__module__.startswith("torch") and of is not torch.Tensor


_FREE = frozenset(
    [
        "get_tracing_state",
        "is_grad_enabled",
        "is_autocast_enabled",
        "is_autocast_cache_enabled",
        "get_autocast_dtype",
        "get_default_dtype",
        "is_tensor",
        "is_floating_point",
        "is_complex",
        "has_torch_function",
        "has_torch_function_unary",
        "has_torch_function_variadic",
        "is_tracing",
        "is_inference_mode_enabled",
        "has_torch_function",
        "promote_types",
        "result_type",
        "can_cast",
        "broadcast_shapes",
        "are_deterministic_algorithms_enabled",
        "is_fwd_grad_enabled",
        "is_autocast_cpu_enabled",
        "get_autocast_cpu_dtype",
        "get_autocast_gpu_dtype",
        "get_privateuse1_backend_name",
        "is_nonzero",
        "numel",
        "log_api_usage_once",
        "functionalize_enabled",
        "peek_interpreter_stack",
        "is_any_autocast_enabled",
        "is_torch_function_enabled",
        "len_torch_dispatch_stack",
        "len_torch_function_stack",
        "is_torch_function_mode_enabled",
        "is_inference",
        "is_alias_of",
    ]
)
"""Functions of torch's that depend on their arguments, or on settings that are compared anyway (`torch_state`)."""

_PYBIND = "pybind11_builtins"
"""The module of what functions of extensions are bound to where pybind11 is older (torch 2.11)."""
_ASKS = re.compile(r"_?(get|is)_|_(accelerator|cuda|mps|mtia|xpu)_(get|is)")
"""Names of functions that say something about torch. transformers asks whether a CUDA stream is captured, which is such a function in CUDA builds of torch."""


def _c_function(observer: Observer, f: Function, name: str, args: Args, kwargs: Kwargs) -> Any:
    module = getattr(f, "__module__", None) or ""
    of: Any = getattr(f, "__self__", None)
    home = of.__name__ if is_a(of, types.ModuleType) else ""
    if _is_torch(f) or module.startswith("torch") or home.startswith("torch"):
        if mode := _asks_for_mode(name):
            observer.refuse(mode)
            return f(*args, **kwargs)
        _note_memory(observer, name.lstrip("_"))
        if name.lstrip("_") in _FREE or (_is_aten(name) and not name.startswith("set_")) or f in _TORCH_PURE:
            _check_out(observer, kwargs)
            if name.endswith("_"):
                _check_host_write(observer, args[:1])
            probes.check_arguments(observer, args, kwargs, f"calls torch.{name} with")
            return f(*args, **kwargs)
        if _ASKS.match(name) and not args and not kwargs:
            return _asked_again(observer, f, args, kwargs)
        return _opaque(observer, f, args, kwargs)
    if home in ("math", "cmath", "_operator", "operator") or f in _PURE:
        for x in (*args, *kwargs.values()):
            probes.operand(x)
        return f(*args, **kwargs)
    return _opaque(observer, f, args, kwargs)


_TORCH_PURE: tuple[Any, ...] = tuple(
    f
    for f in (getattr(torch, n, None) for n in ("tensor", "as_tensor", "from_numpy", "scalar_tensor", "asarray", "finfo", "iinfo"))
    if f is not None
)
_PURE = (abs, bin, chr, divmod, hex, oct, ord, pow, round, ascii)


# -- builtins that need a rule of their own -----------------------------------------------------------


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
        return _opaque(observer, f, args, kwargs)
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


def _plainly(observer: Observer, f: Function, args: Args, kwargs: Kwargs) -> Any:
    return f(*args, **kwargs)


def _len(observer: Observer, f: Function, args: Args, kwargs: Kwargs) -> Any:
    (x,) = args
    kind = type(x)
    if is_a(x, torch.Tensor) or kind is tuple:
        return len(x)
    how = observer.lookup(kind, "__len__")
    if is_a(how, types.FunctionType):
        return call(observer, how, (x,), {})
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
    return _opaque(observer, f, args, kwargs)


def _gone_through(observer: Observer, f: Function, args: Any, kwargs: Kwargs) -> Any:
    """`list(x)`, `zip(x, y)` and the like."""
    if f in (sorted, min, max, sum, any, all):
        for x in args:
            if is_a(x, (list, tuple, set)):
                _elements_are_plain(observer, f, x)
    args = [a if unchanging(a) and not is_a(a, type) else probes.merged(a) if f is dict and is_a(a, dict) else _through(f, a) for a in args]
    if callable(kwargs.get("key")):
        kwargs = {**kwargs, "key": _callback(observer, kwargs["key"])}
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
        function = _callback(observer, function)
    return observer.own(f(function, *map(probes.iterate, rest), **kwargs))


def _callback(observer: Observer, f: Function) -> Any:
    """A function to be called from C."""
    return functools.partial(probes.call, f)


def _iter(observer: Observer, f: Function, args: Args, kwargs: Kwargs) -> Any:
    if len(args) != 1:
        return _opaque(observer, f, args, kwargs)
    return observer.own(iter(probes.iterate(args[0])))


def _next(observer: Observer, f: Function, args: Args, kwargs: Kwargs) -> Any:
    if not observer.is_own(args[0]):
        observer.refuse(f"it takes an element from a {type(args[0]).__name__} that was there before, which is an iterator")
    return observer.seen(f(*args))


def _number(observer: Observer, f: Function, args: Args, kwargs: Kwargs) -> Any:
    """`int(x)`, `str(x)`, `range(n)`."""
    for x in (*args, *kwargs.values()):
        if is_a(x, torch.Tensor):
            if f in (str, repr, format):
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
        return _opaque(observer, f, args, kwargs)
    if not observer.is_own(f):
        observer.conditions.question(_parts, (f,), _parts(f), "a functools.partial")
        for x in (*f.args, *f.keywords.values()):
            observer.seen(x)
    return call(observer, f.func, (*f.args, *args), {**f.keywords, **kwargs})


def _parts(f: functools.partial[Any]) -> Any:
    return (f.func, f.args, *f.keywords, *f.keywords.values())


def _cached(observer: Observer, f: Any, args: Args, kwargs: Kwargs) -> Any:
    """A function under `functools.lru_cache`: what it kept is asked for again."""
    if not all(unchanging(x) or is_a(x, logging.Logger) for x in (*args, *kwargs.values())):
        return _opaque(observer, f, args, kwargs)
    if not (f.__module__ or "").startswith(("torch.", "transformers.", "logging")):
        return _opaque(observer, f, args, kwargs, "its cache counts who asks")
    before = f.cache_info().misses
    with observer.unwatched():
        found = f(*args, **kwargs)
    if f.cache_info().misses != before:
        observer.refuse(f"it fills the cache of {_name(f)}", lasting=False)
    ask = functools.partial(f, **kwargs) if kwargs else f
    observer.conditions.question(ask, args, found, f"what {_name(f)} keeps")
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
    return _opaque(observer, f, args, kwargs)


def _deep_copy(observer: Observer, f: Function, args: Args, kwargs: Kwargs) -> Any:
    """`copy.deepcopy` of lists, dicts and plain objects: everything in them is read, and the copies are the run's own."""
    if len(args) != 1 or kwargs:
        return _opaque(observer, f, args, kwargs)
    with observer.unwatched():
        _all_of(observer, args[0], {}, _note)
        found = f(args[0])
        _all_of(observer, found, {}, lambda observer, x: observer.own(x))
    return found


def _note(observer: Observer, x: object) -> None:
    if is_a(x, (list, dict, set)):
        observer.elements(x)
    elif not observer.is_own(x):
        if observer.lookup(type(x), "__deepcopy__") is not MISSING or observer.lookup(type(x), "__reduce_ex__") is not object.__reduce_ex__:
            observer.refuse(f"it copies a {type(x).__name__}")
        observer.conditions.object(x)
        observer.elements(object.__getattribute__(x, "__dict__"), f"the attributes of a {type(x).__name__}")


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


def _checkpoint(observer: Observer, f: Function, args: Args, kwargs: Kwargs) -> Any:
    """An activation checkpoint: the function is followed now, and runs again in the backward pass."""
    observer.recomputes = True
    function, *rest = args
    return f(functools.partial(probes.call, function), *rest, **kwargs)


def _op(observer: Observer, f: Any, args: Args, kwargs: Kwargs) -> Any:
    namespace, name = (f._schema.name if is_a(f, torch._ops.OpOverload) else f._qualified_op_name).split("::")
    if namespace not in ("aten", "prims", "torch_bridge", "nxd_jax", "xla"):
        return _opaque(observer, f, args, kwargs)
    _note_memory(observer, name)
    _check_out(observer, kwargs)
    _check_host_write(observer, [a for a in args[:1] if is_a(a, torch.Tensor)] if "_." in str(f) or str(f).endswith("_") else ())
    probes.check_arguments(observer, args, kwargs, f"calls {f} with")
    return f(*args, **kwargs)


def _register_hook(observer: Observer, f: Any, args: Args, kwargs: Kwargs) -> Any:
    hook = args[1] if len(args) > 1 else None
    if not _is_ours(getattr(hook, "__func__", hook)):  # those of activation checkpoints are part of what is recorded
        observer.refuse("it registers a hook on a tensor")
    return f(*args, **kwargs)


def _backward_inside(observer: Observer, f: Function, args: Args, kwargs: Kwargs) -> Any:
    observer.refuse("it runs a backward pass inside, which sets .grad")
    return f(*args, **kwargs)


def _gradients_inside(observer: Observer, f: Function, args: Args, kwargs: Kwargs) -> Any:
    probes.check_arguments(observer, args, kwargs, "takes gradients of")
    return f(*args, **kwargs)


def _running_backward(observer: Observer, f: Function, args: Args, kwargs: Kwargs) -> Any:
    """Which backward pass runs: none (-1) in a forward pass, but for one that an activation checkpoint computes again."""
    found = f(*args, **kwargs)
    if found >= 0:
        observer.refuse("it asks which backward pass runs, within one", lasting=False)
    return found


def _weak_reference(observer: Observer, f: weakref.ref[Any], args: Args, kwargs: Kwargs) -> Any:
    """`ref()`. What is gone stays gone. A tensor that was read elsewhere, too, lives as long as that place holds it, which is a condition already.

    Conditions on anything else would keep it alive themselves.
    """
    found = f(*args, **kwargs)
    if type(f) is weakref.ref and (found is None or (is_a(found, torch.Tensor) and observer.conditions.has_tensor(found))):
        return found
    return _opaque(observer, f, args, kwargs)


_BY_TYPE: list[tuple[Any, Any]] = [
    (functools.partial, _call_partial),
    (weakref.ref, _weak_reference),
    (functools._lru_cache_wrapper, _cached),
    ((torch._ops.OpOverload, torch._ops.OpOverloadPacket), _op),
    (_NUMPY, _numpy),
]


def add_rule(kind: type, rule: Callable[..., Any]) -> None:
    """Calls of objects of a class: rule(observer, object, args, kwargs)."""
    _BY_TYPE.append((kind, rule))


def _rules() -> dict[int, Any]:
    found: dict[int, Any] = {
        id(getattr): _getattr,
        id(hasattr): _hasattr,
        id(setattr): _setattr,
        id(delattr): _delattr,
        id(type): _type,
        id(isinstance): _isinstance,
        id(issubclass): _plainly,
        id(callable): _isinstance_of_call,
        id(len): _len,
        id(iter): _iter,
        id(next): _next,
        id(bool): _bool,
        id(object): _object,
        id(functools.partial): _partial,
        id(weakref.ref): _object,
        id(checkpoints.checkpoint): _checkpoint,
        id(super): _plainly,
        id(copy.deepcopy): _deep_copy,
        id(inspect.signature): _signature,
        id(tuple): _tuple,
        id(slice): _plainly,
        id(map): _mapped,
        id(filter): _mapped,
        id(torch.Tensor.register_hook): _register_hook,
        id(torch.Tensor.backward): _backward_inside,
        id(torch.autograd.backward): _backward_inside,
        id(torch.autograd.grad): _gradients_inside,
        id(torch._C._current_graph_task_id): _running_backward,
        id(torch.compiler.is_compiling): _plainly,
        id(torch.jit.is_scripting): _plainly,
        id(torch.jit.is_tracing): _plainly,
    }
    f: Any = getattr(re, "_compile", None)
    if f is not None:
        found[id(f)] = _plainly  # a pattern for a string, from a cache or new
    for f in (
        list,
        set,
        frozenset,
        dict,
        zip,
        enumerate,
        sorted,
        reversed,
        min,
        max,
        sum,
        any,
        all,
        collections.deque,
        collections.OrderedDict,
    ):
        found[id(f)] = _gone_through
    for f in (itertools.chain, itertools.islice, itertools.product, itertools.zip_longest, itertools.repeat):
        found[id(f)] = _object_of_iterables
    for f in (int, float, complex, str, bytes, range, abs, round, divmod, pow, repr, format, hash):
        found[id(f)] = _number
    for f in (torch.device, torch.finfo, torch.iinfo, torch.Size):
        found[id(f)] = _torch_value
    for f, numbers in _ARGUMENTS.items():
        found[id(f)] = _with_arguments(found[id(f)], numbers)
    return found


_ARGUMENTS: dict[Any, tuple[int, ...]] = {
    getattr: (2, 3),
    hasattr: (2,),
    setattr: (3,),
    delattr: (2,),
    isinstance: (2,),
    callable: (1,),
    len: (1,),
    next: (1, 2),
    bool: (0, 1),
    functools.partial: tuple(range(1, 100)),
    map: tuple(range(2, 100)),
    filter: (2,),
    tuple: (0, 1),
}
"""How many arguments rules expect."""


def _with_arguments(rule: Callable[..., Any], numbers: tuple[int, ...]) -> Callable[..., Any]:
    """The rule for calls with so many arguments; what is wrong with others, the function says itself."""
    names = rule in (_partial, _mapped)

    def checked(observer: Observer, f: Function, args: Args, kwargs: Kwargs) -> Any:
        if len(args) not in numbers or (kwargs and not names):
            return _opaque(observer, f, args, kwargs)
        return rule(observer, f, args, kwargs)

    return checked


def _isinstance_of_call(observer: Observer, f: Function, args: Args, kwargs: Kwargs) -> Any:
    _type(observer, type, args, {})
    observer.lookup(type(args[0]), "__call__")
    return f(*args)


def _object_of_iterables(observer: Observer, f: Function, args: Any, kwargs: Kwargs) -> Any:
    args = [a if unchanging(a) or f is itertools.repeat else probes.iterate(a) for a in args]
    return observer.own(f(*args, **kwargs))


def _torch_value(observer: Observer, f: Function, args: Args, kwargs: Kwargs) -> Any:
    probes.check_arguments(observer, args, kwargs, f"makes a {f.__name__} of")
    return f(*args, **kwargs)


_RULES = _rules()
