"""One aten call as nodes name it: an `Entry` has everything but the tensors and the numbers that may change."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch

from torch_bridge.ir.layout import Layout

if TYPE_CHECKING:
    from torch_bridge.ir.number_families import NumberFamily


class Slot:
    """In an entry's template: the place of its i-th tensor input."""

    __slots__ = ("index",)

    def __init__(self, index: int):
        self.index = index


class Lift:
    """In an entry's template: the place of its i-th lifted number, and the Python type it had."""

    __slots__ = ("index", "kind")

    def __init__(self, index: int, kind: type):
        self.index = index
        self.kind = kind


class Entry:
    """One functional aten call up to its tensors and lifted numbers.

    op, args, kwargs: the call, with `Slot`s and `Lift`s. outs: base layouts of its results (None: undefined).
    paths: where each result sits in what the op returns (an empty path: it is all of it). axes: mesh axes along which a random op draws anew.
    casts: for a result written into a tensor of another dtype, that dtype. rng: draws random numbers. lifted: the types of its lifted numbers in order, once
    they have been found (`graph.lifted_kinds`). family: those that differ from it in numbers alone, such as where a slice starts; numbers: its own, None if
    they are lifted.
    """

    __slots__ = ("_varied", "args", "axes", "casts", "family", "kwargs", "lifted", "n_outs", "numbers", "op", "outs", "paths", "rng")

    def __init__(
        self, op: torch._ops.OpOverload, args: Any, kwargs: Any, outs: tuple[Layout | None, ...], casts: Any = (), rng: bool = False
    ):
        self.op = op
        self.args = args
        self.kwargs = kwargs
        self.outs = outs
        self.n_outs = len(outs)
        self.paths: tuple[tuple[int, ...], ...] = ((),)
        self.casts = casts
        self.rng = rng
        self.axes: tuple[str, ...] = ()
        self.lifted: list[type] | None = None
        self.family: NumberFamily | None = None
        self.numbers: tuple[Any, ...] | None = None
        self._varied: dict[tuple[str, ...], Entry] = {}

    def varied(self, axes: tuple[str, ...]) -> Entry:
        """The same random op with numbers that differ along mesh axes, even where its inputs agree."""
        found = self._varied.get(axes)
        if found is None:
            found = self._varied[axes] = copy.copy(self)
            found.axes = axes
        return found

    def __repr__(self) -> str:
        return f"Entry({self.op}, outs={list(self.outs)})"
