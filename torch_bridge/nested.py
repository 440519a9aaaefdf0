"""Finding and replacing values inside nested Python data: what loaders, `xm.save` and `ToXlaTensorArena` walk."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from typing import Any

import torch

Select = Callable[[Any], bool]

_LEAVES = (
    str,
    bytes,
    int,
    float,
    complex,
    bool,
    type(None),
    type,
    torch.dtype,
    torch.device,
    torch.Generator,
    types.ModuleType,
    torch.nn.Module,
)


class Wrapper:
    """Data that says itself what its tensors are, and makes what takes its place from others: `get_tensors()`, `from_tensors(tensors)`."""

    def get_tensors(self) -> Any:
        raise NotImplementedError("get_tensors() is to be written by the subclass")

    def from_tensors(self, tensors: Any) -> Any:
        raise NotImplementedError("from_tensors() is to be written by the subclass")


def collect(data: Any, select: Select) -> list[Any]:
    """The selected values in the order `replace` meets them, each object once."""
    walk = _Walk(select)
    walk.visit(data)
    return walk.found


def replace(data: Any, select: Select, new: list[Any]) -> Any:
    """A copy of `data` with each value that `collect` found replaced by the one at its place in `new`.

    Parts without such values are shared, not copied.
    """
    walk = _Walk(select)
    walk.visit(data)
    if len(new) != len(walk.found):
        raise ValueError(f"{len(walk.found)} values were selected but {len(new)} replacements given")
    walk.values.update({id(old): value for old, value in zip(walk.found, new, strict=True)})
    return walk.rebuild(data)


class _Walk:
    def __init__(self, select: Select):
        self.select = select
        self.found: list[Any] = []
        self.holds: dict[int, bool] = {}
        """For every visited object: whether a selected value is inside."""
        self.values: dict[int, Any] = {}
        """What takes the place of an object."""
        self.keep: list[Any] = []
        self.inside: dict[int, Any] = {}
        """What each `Wrapper` gave."""

    def visit(self, x: Any) -> bool:
        if isinstance(x, _LEAVES) and not self.select(x):
            return False
        known = self.holds.get(id(x))
        if known is not None:
            return known
        self.keep.append(x)
        if self.select(x):
            self.found.append(x)
            self.holds[id(x)] = True
            return True
        self.holds[id(x)] = False
        if isinstance(x, Wrapper):
            self.inside[id(x)] = x.get_tensors()
        inside = [self.visit(child) for child in ([self.inside[id(x)]] if isinstance(x, Wrapper) else _children(x))]
        self.holds[id(x)] = any(inside)
        return self.holds[id(x)]

    def rebuild(self, x: Any) -> Any:
        if id(x) in self.values:
            return self.values[id(x)]
        if not self.holds.get(id(x), False):
            return x
        if isinstance(x, Wrapper):
            made: Any = x.from_tensors(self.rebuild(self.inside[id(x)]))
            self.values[id(x)] = made
        elif isinstance(x, dict):
            made = copy.copy(x)
            self.values[id(x)] = made
            if any(self.holds.get(id(k), False) for k in x):
                made.clear()
            for k, v in x.items():
                made[self.rebuild(k)] = self.rebuild(v)
        elif isinstance(x, list):
            made = copy.copy(x)
            self.values[id(x)] = made
            made[:] = [self.rebuild(v) for v in x]
        elif isinstance(x, (tuple, set, frozenset)):
            items = [self.rebuild(v) for v in x]
            made = self.values[id(x)] = type(x)(*items) if hasattr(x, "_fields") else type(x)(items)
        else:
            made = copy.copy(x)
            self.values[id(x)] = made
            for k, v in vars(x).items():
                made.__dict__[k] = self.rebuild(v)
        return made


def _children(x: Any) -> list[Any]:
    if isinstance(x, dict):
        return [*x, *x.values()]
    if isinstance(x, (list, tuple, set, frozenset)):
        return list(x)
    if isinstance(x, torch.Tensor) or callable(x):
        return []
    return list(getattr(x, "__dict__", {}).values())
