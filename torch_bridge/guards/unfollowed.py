"""Which functions are this project's, which were generated, and what is done with calls that are not followed into."""

from __future__ import annotations

import enum
import functools
import types
from typing import Any

import torch

from torch_bridge.guards.observer import Args, Function, Kwargs, Observer
from torch_bridge.guards.values import is_a

OURS = ("torch_bridge.", "nxd_jax.")


def opaque(observer: Observer, f: Function, args: Args, kwargs: Kwargs, why: str = "") -> Any:
    """A call of something that is not known: it ends the conclusions. why: it is not."""
    observer.refuse(f"it calls {name_of(f)}" + (f": {why}" if why else ""))
    return f(*args, **kwargs)


def name_of(f: Function) -> str:
    """What a function is called in reasons, with its module."""
    name = getattr(f, "__qualname__", None) or getattr(f, "__name__", None)
    module = getattr(f, "__module__", None)
    if name is None:
        return f"a {type(f).__name__}"
    return f"{module}.{name}" if is_a(module, str) and module != "builtins" else str(name)


def asked_again(observer: Observer, f: Function, args: Args, kwargs: Kwargs) -> Any:
    """Something whose answer is asked for again before every call that is played."""
    found = f(*args, **kwargs)
    ask = functools.partial(f, **kwargs) if kwargs else f
    observer.conditions.question(ask, args, found, f"what {name_of(f)} says")
    return observer.seen(found)


def is_ours(f: Any) -> bool:
    """Whether a function is this project's, also where it takes the place of another one, whose names it bears."""
    return f"{getattr(f, '__globals__', {}).get('__name__') or ''}.".startswith(OURS)


def is_generated(f: types.FunctionType) -> bool:
    """Whether `dataclasses` or `collections.namedtuple` wrote it."""
    return f.__code__.co_filename.startswith("<string>") and f.__name__ in ("__init__", "__new__", "__eq__", "__repr__", "__create_fn__")


def plainly(observer: Observer, f: Function, args: Args, kwargs: Kwargs) -> Any:
    """A call of something that depends on nothing but its arguments, or on what is compared anyway."""
    return f(*args, **kwargs)


def has_objects(args: Args, kwargs: Kwargs) -> bool:
    """Whether there are objects among the arguments whose state a function may read."""
    return any(is_a(x, torch.nn.Module) or (type(x).__dictoffset__ and not _stateless(x)) for x in (*args, *kwargs.values()))


def _stateless(x: object) -> bool:
    """Whether what an object of this project's or torch's holds is not the script's."""
    if is_a(x, (torch.Tensor, type, types.FunctionType, types.ModuleType, enum.Enum)):
        return True
    held = list(object.__getattribute__(x, "__dict__").values())
    return type(x).__module__.startswith((*OURS, "torch")) and not any(is_a(v, (torch.nn.Module, types.FunctionType)) for v in held)
