"""The classes of builtin containers, iterators and views, and what is said of objects."""

from __future__ import annotations

import collections
import types
from typing import Any

from torch_bridge.guards.observer import Observer
from torch_bridge.guards.values import is_a

BUILTIN = (list, dict, set, collections.deque, collections.OrderedDict, collections.defaultdict, bytearray)
_EMPTY: tuple[Any, ...] = ([], (), {}, "", set(), range(0), {}.values(), {}.items(), collections.deque())
_DICTS: tuple[dict[Any, Any], ...] = ({}, collections.OrderedDict())
_REVERSIBLE: tuple[Any, ...] = ([], (), {}, {}.values(), {}.items(), range(0), collections.deque())
ITERATORS = (
    types.GeneratorType,
    *(type(iter(x)) for x in _EMPTY),
    *(type(reversed(x)) for x in _REVERSIBLE),
    *(zip, map, filter, enumerate),
)
VIEWS = (
    types.MappingProxyType,
    *(type(view) for made in _DICTS for view in (made.keys(), made.values(), made.items())),
)
FIELD = type(vars(collections.namedtuple("_Pair", "a b"))["a"])
"""How a field of a named tuple is read."""


def called(x: object) -> str:
    """What reasons call it: its class."""
    return type(x).__name__


def in_python(observer: Observer, x: object, names: tuple[str, ...]) -> bool:
    """Whether its class has one of these methods in Python."""
    return any(is_a(observer.lookup(type(x), name), types.FunctionType) for name in names)
