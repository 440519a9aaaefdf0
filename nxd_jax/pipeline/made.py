"""What programs of stages make, as arrays: tensors are made of it only for passes that are recorded.

A `Result` says which result of a program a tensor is, and how it lies on it; a `Tree` says that of all tensors in a value. Both hold for every run of the
program, so with the arrays of one run they are its values (`MadeTensor`, `Made`), which go from stage to stage as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from torch_bridge.ir.layout import Layout
from torch_bridge.ir.segment import Storage
from torch_bridge.recorder.tensor import XLATensor, make

_PLAIN = (bool, int, float, str, type(None), torch.device, torch.dtype, torch.Size)


class Result(NamedTuple):
    """A tensor that a program makes. number: of the result; base, view: layouts of its storage and its own; spec: how ranks hold it; grad: it takes
    gradients."""

    number: int
    base: Layout
    view: Layout
    spec: Any
    grad: bool

    def tensor(self, array: Any, storages: dict[int, Storage] | None = None) -> torch.Tensor:
        """The tensor on an array. storages: those that are there, by number of the result, which tensors of one result share."""
        storage = None if storages is None else storages.get(self.number)
        if storage is None:
            storage = Storage(self.base, array)
            if self.spec is not None:
                storage.describe(spec=self.spec)
            if storages is not None:
                storages[self.number] = storage
        t = make(self.view, storage)
        return t.requires_grad_() if self.grad else t

    def described(self, array: Any) -> tuple[Any, ...]:
        """The same as `described` of the tensor."""
        return self.view, self.base, self.grad, self.spec, array.sharding


class MadeTensor(NamedTuple):
    """One tensor that a run has made."""

    of: Result
    array: Any

    def tensor(self) -> torch.Tensor:
        """A new tensor on it."""
        return self.of.tensor(self.array)


class Tree:
    """A value of plain objects and tensors that a program makes.

    Args:
        leaves: the objects, and a `Result` for each tensor.
        how: they are put together.
    """

    def __init__(self, leaves: list[Any], how: Any):
        self.leaves = leaves
        self.how = how
        self.results: list[Result] = [x for x in leaves if type(x) is Result]
        self.learning = [k for k, result in enumerate(self.results) if result.grad]
        """Which of the tensors take gradients."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Tree) and (self.leaves, self.how) == (other.leaves, other.how)

    __hash__ = None  # type: ignore[assignment]

    def made(self, results: Sequence[Any]) -> Made:
        """The value of a run. results: what the program gave."""
        return Made(self, [results[result.number] for result in self.results])


class Made(NamedTuple):
    """A value that a run has made. arrays: of the tensors in it, in order; moved: each is a copy at another place."""

    tree: Tree
    arrays: list[Any]
    moved: bool = False

    def value(self) -> Any:
        """It with new tensors. Those of one result share their storage, unless they were moved."""
        storages: dict[int, Storage] | None = None if self.moved else {}
        arrays = iter(self.arrays)
        leaves = [x.tensor(next(arrays), storages) if type(x) is Result else x for x in self.tree.leaves]
        return pytree.tree_unflatten(leaves, self.tree.how)

    def described(self) -> list[Any]:
        """The same as `described` of the leaves of `value`."""
        arrays = iter(self.arrays)
        return [x.described(next(arrays)) if type(x) is Result else _plain(x) for x in self.tree.leaves]


def described(leaves: Sequence[Any]) -> list[Any] | None:
    """What values have in common that one program takes; None if one cannot be compared, or has no array."""
    found: list[Any] = []
    for x in leaves:
        if isinstance(x, XLATensor):
            held = x._storage.held
            if held is None or x._storage.pending:
                return None
            found.append((x._layout, x._storage.layout, x.requires_grad, x._storage.spec, held.sharding))
        elif type(x) in _PLAIN:
            found.append(_plain(x))
        else:
            return None
    return found


def _plain(x: object) -> tuple[Any, ...]:
    return type(x), repr(x) if type(x) is float else x


def held(leaves: Sequence[Any]) -> list[Any]:
    """The arrays of the tensors among them."""
    return [x._storage.held for x in leaves if isinstance(x, XLATensor)]


def result(t: Any, number: Mapping[int, int]) -> Result | None:
    """A tensor as a program's result, None if it is not one. number: of storages, by `id()`."""
    found = number.get(id(t._storage)) if type(t) is XLATensor else None
    if found is None:
        return None
    return Result(found, t._storage.layout, t._layout, t._storage.spec, t.requires_grad)


def tree(value: Any, number: Mapping[int, int]) -> Tree | None:
    """A value by the results that its tensors are; None if there is something else in it."""
    leaves, how = pytree.tree_flatten(value)
    found = [result(x, number) if isinstance(x, torch.Tensor) else x for x in leaves]
    if any(x is None and isinstance(leaf, torch.Tensor) for x, leaf in zip(found, leaves, strict=True)):
        return None
    return Tree(found, how) if all(type(x) in (Result, *_PLAIN) for x in found) else None
