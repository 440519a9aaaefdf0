"""What functions read beside their arguments: globals, closures, mutable defaults and class attributes, also through the functions and methods they name."""

from __future__ import annotations

import logging
import types
from collections.abc import Iterable, Iterator
from typing import Any

import torch

_MOST = 200
"""Functions that are followed from one forward."""
_OURS = ("torch.", "torch_bridge.", "nxd_jax.", "numpy.", "jax.")
"""Modules whose functions are not followed: they depend on their arguments and on settings that are looked at anyway (`ambient`)."""
_CONSTANT = (types.ModuleType, types.BuiltinFunctionType, logging.Logger, torch._ops.OpOverload, torch._ops.OpOverloadPacket)

Place = tuple[Any, Any]
"""Something with `get(key)`, and a key."""


class Cell:
    """A variable of an enclosing function, to be read like a dict's."""

    def __init__(self, cell: types.CellType):
        self._cell = cell

    def get(self, key: Any, default: Any = None) -> Any:
        """Its value."""
        try:
            return self._cell.cell_contents
        except ValueError:  # not assigned yet
            return default


def of_class(kind: type) -> list[Place]:
    """Of a module class: what its forward reads, and simple attributes of the class and its bases up to torch's."""
    reader = _Reader(kind)
    own = [c for c in kind.__mro__ if not f"{c.__module__}.".startswith(_OURS) and c is not object]
    for cls in own:
        reader.places += [(vars(cls), name) for name, value in vars(cls).items() if not name.startswith("__") and _may_change(value)]
    reader.method("forward")
    return reader.places


def of_function(function: Any) -> list[Place]:
    """Of a function."""
    reader = _Reader(None)
    reader.follow(function)
    return reader.places


def _may_change(value: Any) -> bool:
    """Whether a value of this type, found under a class attribute, can be the state of something."""
    return value is None or isinstance(value, (bool, int, float, str, list, dict, set, torch.Tensor)) or hasattr(type(value), "__next__")


class _Reader:
    def __init__(self, kind: type | None):
        self.places: list[Place] = []
        self._kind = kind
        self._seen: set[Any] = set()

    def follow(self, function: Any) -> None:
        """Add what a function reads."""
        function = getattr(function, "__func__", function)
        while hasattr(function, "__wrapped__") and not isinstance(function, types.FunctionType):
            function = function.__wrapped__
        if not isinstance(function, types.FunctionType) or function in self._seen or len(self._seen) >= _MOST:
            return
        space = function.__globals__
        if f"{space.get('__name__', '')}.".startswith(_OURS):
            return
        self._seen.add(function)
        for default in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            if isinstance(default, (list, dict, set)):
                self.places.append(({"": default}, ""))
        for cell in function.__closure__ or ():
            self._add(Cell(cell), "")
        names = dict.fromkeys(_names(function.__code__))
        for name in names:
            if isinstance(space.get(name), types.ModuleType):
                self._settings(space[name], names)
            elif name in space:
                self._add(space, name)
            if self._kind is not None:
                self.method(name)

    def method(self, name: str) -> None:
        """Follow a method or property of the class, if it has one of that name."""
        for cls in () if self._kind is None else self._kind.__mro__:
            found = vars(cls).get(name)
            if found is not None:
                found = getattr(found, "fget", None) or getattr(found, "__func__", found)
                if isinstance(found, types.FunctionType) and found not in self._seen and not f"{cls.__module__}.".startswith(_OURS):
                    self.places.append((vars(cls), name))
                    self.follow(found)
                return

    def _add(self, space: Any, name: str) -> None:
        value = space.get(name)
        if isinstance(value, (type, _CONSTANT)):
            return
        self.places.append((space, name))
        self.follow(value)

    def _settings(self, module: types.ModuleType, names: Iterable[str]) -> None:
        """Variables of a module that the code names."""
        if not f"{module.__name__}.".startswith(_OURS):
            for name in names:
                if name in vars(module) and not isinstance(vars(module)[name], types.FunctionType):
                    self._add(vars(module), name)


def _names(code: types.CodeType) -> Iterator[str]:
    """Names in a function's code and in those of the functions it defines."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)
