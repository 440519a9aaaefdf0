"""Values that live as rows of one stacked array, as a program that loops over layers takes and gives them.

A `Row` stands in a storage where a JAX array would. A program that takes the whole stack gets it as it is; whoever wants one value gets a copy of it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from torch_bridge import _compat
from torch_bridge.mesh import abstract_arrays


class Stack:
    """array: the rows along dim 0; sharding: of each row."""

    __slots__ = ("array", "dtype", "shape", "sharding")

    def __init__(self, array: Any):
        self.array = array
        self.shape = tuple(array.shape[1:])
        self.dtype = array.dtype
        whole = array.sharding
        self.sharding = NamedSharding(whole.mesh, PartitionSpec(*whole.spec[1:])) if isinstance(whole, NamedSharding) else whole

    def rows(self) -> list[Row]:
        """Each row, in order."""
        return [Row(self, k) for k in range(self.array.shape[0])]


class Row:
    """One row of a stack: `shape`, `dtype` and `sharding` as an array of its own would have."""

    __slots__ = ("__weakref__", "index", "stack")

    def __init__(self, stack: Stack, index: int):
        self.stack = stack
        self.index = index

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stack.shape

    @property
    def dtype(self) -> Any:
        return self.stack.dtype

    @property
    def sharding(self) -> Any:
        return self.stack.sharding

    def is_deleted(self) -> bool:
        """Whether the stack is gone (a program took it over)."""
        return self.stack.array.is_deleted()

    def value(self) -> Any:
        """A copy of the row as an array of its own."""
        stack = self.stack
        if isinstance(stack.array, abstract_arrays.AbstractArray):
            return abstract_arrays.AbstractArray(stack.shape, stack.dtype, stack.sharding)
        with _compat.enable_x64():
            return _take(stack.sharding if isinstance(stack.sharding, NamedSharding) else None)(stack.array, self.index)


def plain(found: object) -> Any:
    """What a storage holds, as an array."""
    return found.value() if type(found) is Row else found


@functools.lru_cache(maxsize=64)
def _take(sharding: NamedSharding) -> Any:
    return jax.jit(lambda x, k: lax.dynamic_index_in_dim(x, k, 0, keepdims=False), **_out(sharding))


@functools.lru_cache(maxsize=64)
def _stacked(sharding: NamedSharding) -> Any:
    return jax.jit(lambda *xs: jnp.stack(xs), **_out(sharding))


def _out(sharding: NamedSharding) -> dict[str, Any]:
    return {} if sharding is None else {"out_shardings": sharding}


def together(held: Sequence[Any]) -> Any:
    """The array that these are all the rows of, in order; None if they are not."""
    first = held[0]
    if type(first) is not Row or first.stack.array.shape[0] != len(held):
        return None
    of = first.stack
    return of.array if all(type(row) is Row and row.stack is of and row.index == k for k, row in enumerate(held)) else None


def stack(segment: Any, leaves: Sequence[int], on_host: bool = False) -> Any:
    """One array of these leaves (by position), in order. Leaves that are no rows of one stack yet, become that: so do the storages that hold them.

    on_host: copy them there, where putting them together on the device would compile a program for this number of rows alone.
    """
    found = together([segment.leaves[i] for i in leaves])
    if found is not None:
        return found
    rows = [plain(segment.leaves[i]) for i in leaves]
    made = Stack(_compat.put(np.stack(rows)) if on_host else _put_together(rows))
    for i, row in zip(leaves, made.rows(), strict=True):
        before, segment.leaves[i] = segment.leaves[i], row
        holder = segment.holders.get(-i - 1)
        storage = None if holder is None else holder()
        if storage is not None and storage.held is before:
            storage.held = row
    segment.leaf_index = {id(array): -i - 1 for i, array in enumerate(segment.leaves)}
    return made.array


def _put_together(arrays: Sequence[Any]) -> Any:
    one = arrays[0]
    whole = NamedSharding(one.sharding.mesh, PartitionSpec(None, *one.sharding.spec)) if isinstance(one.sharding, NamedSharding) else None
    if isinstance(one, abstract_arrays.AbstractArray):
        return abstract_arrays.AbstractArray((len(arrays), *one.shape), one.dtype, whole or one.sharding)
    with _compat.enable_x64():
        return _stacked(whole)(*arrays)
