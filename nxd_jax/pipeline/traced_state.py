"""Python state that a model's forward reads between its layers: it is part of the traced model, so what a script sets later does nothing there."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from types import CodeType, FunctionType
from typing import Any

from torch import nn

logger = logging.getLogger("nxd_jax")

_PLAIN = (bool, int, float, str, type(None))


class TracedState:
    """Numbers, strings and forward hooks of the modules that were looked into, as they were when the model was traced.

    Args:
        model: the model.
        nodes: names of the modules that are one node each: what is inside of those is not looked at.
        hooked: whether forward hooks ran when it was traced.
    """

    def __init__(self, model: nn.Module, nodes: Iterable[str], hooked: bool):
        inside = tuple(nodes)
        found = [(name, m) for name, m in model.named_modules() if not any(name == n or name.startswith(f"{n}.") for n in inside)]
        self._modules = [(name or type(model).__name__, module, _names(type(module))) for name, module in found]
        self._values = [_attributes(module, names) for _, module, names in self._modules]
        self._hooks = [_hooks(module) if hooked else () for _, module, _ in self._modules]
        self._said: set[tuple[str, str]] = set()

    def warn_of_changes(self) -> None:
        """Say once of each thing that is another one now that the pipeline goes on with the old one."""
        for (name, module, names), values, hooks in zip(self._modules, self._values, self._hooks, strict=True):
            now = _attributes(module, names)
            if now != values:
                for key in [key for key in {**values, **now} if values.get(key) != now.get(key)]:
                    self._warn(name, key, f"{name}.{key} was {values.get(key)!r} when the pipeline was cut, and is {now.get(key)!r} now")
            if _hooks(module) != hooks:
                self._warn(name, "", f"{name} has other forward hooks than those that ran when the pipeline was cut")

    def _warn(self, name: str, key: str, what: str) -> None:
        if (name, key) not in self._said:
            self._said.add((name, key))
            logger.warning(
                "%s: what forward does between layers stays as it was traced, as in NxD. Read it inside a layer, or make a number a buffer (register_buffer) "
                "and write that",
                what,
            )


def _attributes(module: nn.Module, names: frozenset[str]) -> dict[str, Any]:
    return {key: value for key, value in vars(module).items() if key in names and type(value) in _PLAIN}


def _hooks(module: nn.Module) -> tuple[Any, ...]:
    return (*module._forward_pre_hooks.values(), *module._forward_hooks.values())


def _names(cls: type) -> frozenset[str]:
    """The attributes that the code of a class's methods names; those of `nn.Module`, and what is only made in `__init__`, do not count."""
    own = [c for c in cls.__mro__ if c not in nn.Module.__mro__]
    functions = [f for c in own for name, f in vars(c).items() if isinstance(f, FunctionType) and name != "__init__"]
    return frozenset(name for f in functions for name in _named(f.__code__)) - {"training"}


def _named(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _named(constant)
