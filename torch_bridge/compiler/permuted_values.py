"""Values whose arrays have their dims in another order than torch's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from jax import lax

Order = tuple[int, ...]
"""For each dim of an array, as it lies, the dim of the value that it is."""


class Permuted:
    """A value with the arrays that hold it, by the order of their dims.

    Attributes:
        order: the one in which it was computed, or would best be.
        free: it costs the same in every order (a broadcast).
    """

    def __init__(self, order: Order, make: Callable[[Order], Any], free: bool = False):
        self.order = order
        self.free = free
        self._make = make
        self._arrays: dict[Order, Any] = {}

    def read(self, order: Order) -> Any:
        """The array with its dims in an order."""
        if order not in self._arrays:
            self._arrays[order] = self._make(order)
        return self._arrays[order]


def lying(array: Any, order: Order) -> Any:
    """A value of an array with its dims in an order: the array itself if that is torch's."""
    if order == plain(len(order)):
        return array
    return Permuted(order, lambda wanted: array if wanted == order else lax.transpose(array, places(order, wanted)))


def read(value: Any, order: Order) -> Any:
    """The array of a value with its dims in an order."""
    if isinstance(value, Permuted):
        return value.read(order)
    return value if order == plain(len(order)) else lax.transpose(value, order)


def in_torchs_order(value: Any) -> Any:
    """The array of a value as torch has it."""
    return value.read(plain(len(value.order))) if isinstance(value, Permuted) else value


def order_of(value: Any) -> Order:
    """The order in which reading a value costs nothing."""
    return value.order if isinstance(value, Permuted) else plain(np.ndim(value))


def common_order(values: Iterable[Any], ndim: int) -> Order | None:
    """The order in which to compute with several values of so many dims; None: torch's."""
    among = [v for v in values if isinstance(v, Permuted) and len(v.order) == ndim and v.order != plain(ndim)]
    return next((v.order for v in sorted(among, key=lambda v: v.free)), None)


def plain(ndim: int) -> Order:
    """torch's order."""
    return tuple(range(ndim))


def places(order: Order, dims: Iterable[int]) -> tuple[int, ...]:
    """Where dims of a value are in an array of this order."""
    return tuple(order.index(d) for d in dims)


def permuted(entries: Sequence[Any], order: Order) -> tuple[Any, ...]:
    """What a parameter says of each dim of a value, as an array of this order takes it."""
    return tuple(entries[d] for d in order)


def renumbered(dims: Sequence[int]) -> Order:
    """The order of some of a value's dims, when there are no others."""
    ranks = {d: k for k, d in enumerate(sorted(dims))}
    return tuple(ranks[d] for d in dims)


def groups_of_reshape(old: Sequence[int], new: Sequence[int]) -> list[tuple[Order, Order]] | None:
    """The smallest runs of dims before and after a reshape that hold the same elements, in order; a dim of size 1 may face none.

    None: there are no elements.
    """
    if 0 in old or 0 in new:
        return None
    found: list[tuple[Order, Order]] = []
    i = j = 0
    while i < len(old) or j < len(new):
        before, after = i, j
        if i < len(old) and old[i] == 1:
            i += 1
            j += j < len(new) and new[j] == 1
        elif j < len(new) and new[j] == 1:
            j += 1
        else:
            x, y = old[i], new[j]
            i, j = i + 1, j + 1
            while x != y:
                if x < y:
                    x, i = x * old[i], i + 1
                else:
                    y, j = y * new[j], j + 1
        found.append((tuple(range(before, i)), tuple(range(after, j))))
    return found
