"""The one table from aten overloads to JAX functions.

A lowering takes the arguments of its aten schema, in order and by name, with

- tensors as JAX arrays (lists of tensors as Python lists),
- Scalars as Python numbers or `dtypes.Scalar` (a number that is an input of the program): use `dtypes.cast`/`promote`,
- dtypes as `torch.dtype`; `device`, `layout`, `pin_memory`, `memory_format`, `non_blocking`, `generator` are dropped,

and returns JAX arrays (a tuple where the schema has several results). Only functional overloads are registered: in-place
and `out=` variants are derived from them by the recorder. Lowerings run under 64-bit JAX and must be differentiable
by JAX where the op is (they serve `to_jax` too).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Lowering:
    """How one aten overload becomes JAX.

    fn: the JAX function. rng: True if it takes a PRNG key as keyword `key`. lift: True if changing Python numbers in
    Scalar arguments may be inputs of the program (False: they shape the program, as in `arange` or `pow` by 2).
    floats: names of arguments that the schema calls `float` and whose numbers may be inputs as well (a learning rate).

    What the passes ask about an op of ours:
    collective: ranks exchange values; its last argument names the groups.
    entrywise: it treats each entry of its lists of tensors by itself.
    rank_table: the place of an argument that is a table with a number for each rank.
    """

    fn: Callable[..., Any]
    rng: bool = False
    lift: bool = True
    floats: tuple[str, ...] = ()
    collective: bool = False
    entrywise: bool = False
    rank_table: int | None = None


_TABLE: dict[torch._ops.OpOverload, Lowering] = {}


def lowering(
    *ops: torch._ops.OpOverload,
    rng: bool = False,
    lift: bool = True,
    floats: tuple[str, ...] = (),
    collective: bool = False,
    entrywise: bool = False,
    rank_table: int | None = None,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a JAX function for one or more aten overloads; a second registration of an overload raises `ValueError`."""

    def register(fn: Callable[..., Any]) -> Callable[..., Any]:
        for op in ops:
            if not isinstance(op, torch._ops.OpOverload):
                raise TypeError(f"lowering() takes OpOverloads such as torch.ops.aten.add.Tensor, got {op!r}")
            if op in _TABLE:
                raise ValueError(f"{op} already has a lowering ({_TABLE[op].fn.__module__}.{_TABLE[op].fn.__qualname__})")
            _TABLE[op] = Lowering(fn, rng, lift, floats, collective, entrywise, rank_table)
        return fn

    return register


def lookup(op: torch._ops.OpOverload) -> Lowering | None:
    """The lowering of an overload, or None."""
    return _TABLE.get(op)


def is_collective(op: Any) -> bool:
    """Whether ranks exchange values in an op (a node's target)."""
    found = _TABLE.get(op)
    return found is not None and found.collective


def registered() -> dict[torch._ops.OpOverload, Lowering]:
    """All lowerings, as a copy: for coverage tables and tests."""
    return dict(_TABLE)
