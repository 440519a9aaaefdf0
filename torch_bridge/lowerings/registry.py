"""The one table from aten overloads to JAX functions, and of what is known about each op: the passes ask here and keep no lists of their own.

A lowering takes the arguments of its aten schema, in order and by name, with

- tensors as JAX arrays (lists of tensors as Python lists),
- Scalars as Python numbers or `dtypes.Scalar` (a number that is an input of the program): use `dtypes.cast`/`promote`,
- dtypes as `torch.dtype`; `device`, `layout`, `pin_memory`, `memory_format`, `non_blocking`, `generator` are dropped,

and returns JAX arrays (a tuple where the schema has several results). Only functional overloads are registered: in-place
and `out=` variants are derived from them by the recorder. Lowerings run under 64-bit JAX and must be differentiable
by JAX where the op is (they serve `to_jax` too).

What a pass needs to know of an op and nobody said is refused when the op is registered: a forgotten fact would be wrong in silence.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch


class AxesRule(enum.Enum):
    """Which mesh axes a collective's result varies over, from those of its inputs and those of its groups."""

    REMOVES = "not over the axes of its groups: all ranks of a group have the same, as after an all-reduce"
    ADDS = "over the axes of its groups too: each rank of a group has its own, as after a reduce-scatter"
    EVERY = "over all axes of the mesh: what a rank has depends on its place, as after a permutation"


@dataclass(frozen=True)
class Stacks:
    """How an op on lists of tensors takes stacks, so that loops over layers need not take them apart (`fold_repeats`).

    A stack has entries of one shape along a new leading dim. All numbers are places of arguments.

    lists: the lists whose entries belong together; those that are empty are left out.
    replaces: for an op with several lists of results, the lists that they are new values of, in the order of the results.
    constants: a list with a constant for each entry.
    bucket: the most bytes that are treated at once.
    elementwise: a stack may stand for an entry in every list; otherwise the op is done row by row, and takes one list.
    when: whether a call with these arguments treats each entry by itself; None: every call does.
    """

    lists: tuple[int, ...]
    replaces: tuple[int, ...] = ()
    constants: int | None = None
    bucket: int | None = None
    elementwise: bool = False
    when: Callable[[Sequence[Any]], bool] | None = None

    def columns(self, args: Sequence[Any]) -> list[Any]:
        """Of a call's arguments, the lists whose entries belong together."""
        return [args[k] for k in self.lists if args[k]] or [args[self.lists[0]]]

    def results(self, args: Sequence[Any]) -> int:
        """How many lists of results a call has that are not empty."""
        return sum(bool(args[k]) for k in self.replaces) if self.replaces else 1


@dataclass(frozen=True)
class Lowering:
    """How one aten overload becomes JAX.

    fn: the JAX function.
    rng: it takes a PRNG key as keyword `key`.
    mode: it takes the precision of the program (`precision_mode.Mode`) as keyword `mode`. A lowering never reads the environment.
    lift: changing Python numbers in Scalar arguments may be inputs of the program (False: they shape the program, as in `arange` or `pow` by 2).
    floats: names of arguments that the schema calls `float` and whose numbers may be inputs as well (a learning rate).
    writes: it writes its second argument into its first, and takes as keyword `apart` whether the second is made from other places of the first: then it
    may not be done in place.

    What the passes ask:

    collective: ranks exchange values; its last argument names the groups (`axes=AxesRule.EVERY`: whatever it names).
    axes: what a collective's result varies over.
    rank_table: the place of an argument that is a table with a number for each rank.
    entrywise: it treats each entry of its lists of tensors by itself.
    stacks: how it takes stacks of entries.
    view: it computes nothing and is read anew wherever its result is needed.
    cast: it is done again rather than kept where its input is a weight.
    once: it takes long to trace, so that is done once for operands of the same shapes (`traced_once.py`).
    batches: `jax.vmap` of it does for each row what it does for that row alone. Ops that torch tags pointwise do, too.
    kernels: whether a call with these arguments may call kernels of torch (`torch_kernels`); None: none does.
    """

    fn: Callable[..., Any]
    rng: bool = False
    lift: bool = True
    floats: tuple[str, ...] = ()
    mode: bool = False
    writes: bool = False
    collective: bool = False
    axes: AxesRule | None = None
    rank_table: int | None = None
    entrywise: bool = False
    stacks: Stacks | None = None
    view: bool = False
    cast: bool = False
    once: bool = False
    batches: bool = False
    kernels: Callable[[Sequence[Any]], bool] | None = None


_TABLE: dict[torch._ops.OpOverload, Lowering] = {}


def lowering(
    *ops: torch._ops.OpOverload,
    rng: bool = False,
    lift: bool = True,
    floats: tuple[str, ...] = (),
    mode: bool = False,
    writes: bool = False,
    collective: bool = False,
    axes: AxesRule | None = None,
    rank_table: int | None = None,
    entrywise: bool | None = None,
    stacks: Stacks | None = None,
    view: bool = False,
    cast: bool = False,
    once: bool = False,
    batches: bool = False,
    kernels: Callable[[Sequence[Any]], bool] | None = None,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a JAX function for one or more aten overloads, with what is known about them (`Lowering`).

    Raises `ValueError` for a second registration of an overload, for facts that do not fit together or to the schema, for a collective without
    `axes`, and for an op of ours that takes groups and is no collective, or returns a list and does not say whether it is `entrywise`.
    """

    def register(fn: Callable[..., Any]) -> Callable[..., Any]:
        found = Lowering(
            fn, rng, lift, floats, mode, writes, collective, axes, rank_table, bool(entrywise), stacks, view, cast, once, batches, kernels
        )
        for op in ops:
            if not isinstance(op, torch._ops.OpOverload):
                raise TypeError(f"lowering() takes OpOverloads such as torch.ops.aten.add.Tensor, got {op!r}")
            if op in _TABLE:
                raise ValueError(f"{op} already has a lowering ({_TABLE[op].fn.__module__}.{_TABLE[op].fn.__qualname__})")
            if op.namespace == _OURS:
                _check_said(op, found, entrywise)
            for check in (_check_axes, _check_stacks, _check_view):
                check(op, found)
            _TABLE[op] = found
        return fn

    return register


# -- what does not fit ----------------------------------------------------------------------------

_OURS = "torch_bridge"
_LISTS = ("List[Tensor]", "List[Optional[Tensor]]")
_TABLES = ("List[int]", "List[float]")


def _is_list(of: Any) -> bool:
    """Whether an argument or a result is a list of tensors."""
    return str(of.type) in _LISTS


def _types(op: torch._ops.OpOverload) -> list[str]:
    return [str(a.type) for a in op._schema.arguments]


def _at(types: Sequence[str], place: int | None, allowed: Sequence[str]) -> bool:
    """Whether an argument (None: no argument) is there and of a type."""
    return place is None or (0 <= place < len(types) and types[place] in allowed)


def _check_said(op: torch._ops.OpOverload, found: Lowering, entrywise: bool | None) -> None:
    """Of an op of ours: what its schema shows that somebody must have thought of."""
    if entrywise is None and any(map(_is_list, op._schema.returns)):
        raise ValueError(
            f"{op} returns a list: say entrywise=True if it treats each entry of its lists by itself, entrywise=False if entries depend on each other"
        )
    if not found.collective and any(a.name == "groups" for a in op._schema.arguments):
        raise ValueError(
            f"{op} takes groups of ranks: say collective=True, and with axes= which mesh axes its result varies over: {_rules()}"
        )


def _check_axes(op: torch._ops.OpOverload, found: Lowering) -> None:
    if not found.collective and found.axes is None and found.rank_table is None:
        return
    if found.collective and found.axes is None:
        raise ValueError(f"{op} is a collective: say with axes= which mesh axes its result varies over: {_rules()}")
    if found.axes is not None and not isinstance(found.axes, AxesRule):
        raise ValueError(f"{op}: axes={found.axes!r} is no rule; there are {_rules()}")
    if found.axes is not None and not found.collective:
        raise ValueError(f"{op}: axes={found.axes} is for ops in which ranks exchange values: say collective=True, or leave it out")
    last = [(a.name, str(a.type)) for a in op._schema.arguments[-1:]]
    if found.axes in (AxesRule.REMOVES, AxesRule.ADDS) and last != [("groups", "str")]:
        raise ValueError(f"{op}: axes={found.axes} reads the groups from the last argument, `str groups`, and the schema is {op._schema}")
    if not _at(_types(op), found.rank_table, _TABLES):
        raise ValueError(
            f"{op}: rank_table={found.rank_table} is the place of an int[] or float[] argument, and the schema is {op._schema}"
        )


def _rules() -> str:
    return "; ".join(f"AxesRule.{rule.name} ({rule.value})" for rule in AxesRule)


def _check_stacks(op: torch._ops.OpOverload, found: Lowering) -> None:
    stacks = found.stacks
    if stacks is None:
        return
    types, returns = _types(op), op._schema.returns
    if not found.entrywise:
        raise ValueError(f"{op} takes stacks, so it treats each entry of its lists by itself: say entrywise=True")
    if not stacks.lists or not all(_at(types, k, _LISTS) for k in stacks.lists) or not set(stacks.replaces) <= set(stacks.lists):
        raise ValueError(
            f"{op}: lists={stacks.lists} and replaces={stacks.replaces} are places of Tensor[] arguments, and the schema is {op._schema}"
        )
    if not all(map(_is_list, returns)) or len(returns) != max(len(stacks.replaces), 1) or (len(returns) > 1 and len(stacks.lists) == 1):
        raise ValueError(
            f"{op}: replaces={stacks.replaces} names a list for each of several results, which are lists, and the schema is {op._schema}"
        )
    if len(stacks.lists) > 1 and not stacks.elementwise:
        raise ValueError(
            f"{op}: done row by row, an op takes one list, not {len(stacks.lists)}: say elementwise=True if a stack may stand for an entry"
        )
    if not _at(types, stacks.bucket, ("int",)):
        raise ValueError(f"{op}: bucket={stacks.bucket} is the place of an int argument, and the schema is {op._schema}")
    if not _at(types, stacks.constants, _TABLES):
        raise ValueError(f"{op}: constants={stacks.constants} is the place of an int[] or float[] argument, and the schema is {op._schema}")


def _check_view(op: torch._ops.OpOverload, found: Lowering) -> None:
    if not found.view:
        return
    tensors = [k for k, name in enumerate(_types(op)) if "Tensor" in name]
    if tensors != [0] or found.rng or found.mode or found.collective:
        raise ValueError(
            f"{op}: view=True is for ops that read their first argument, the only tensor, in another shape, and need no key, mode or ranks"
        )


# -- what the passes ask --------------------------------------------------------------------------


def lookup(op: Any) -> Lowering | None:
    """The lowering of an overload, or None."""
    return _TABLE.get(op)


def is_collective(op: Any) -> bool:
    """Whether ranks exchange values in an op (a node's target)."""
    found = _TABLE.get(op)
    return found is not None and found.collective


def is_view(op: Any) -> bool:
    """Whether an op (a node's target) computes nothing."""
    found = _TABLE.get(op)
    return found is not None and found.view


def is_cast(op: Any) -> bool:
    """Whether an op (a node's target) on a weight is done again rather than kept."""
    found = _TABLE.get(op)
    return found is not None and found.cast


def batches(op: Any) -> bool:
    """Whether an op (a node's target) may be done for many inputs side by side."""
    found = _TABLE.get(op)
    return torch.Tag.pointwise in getattr(op, "tags", ()) or (found is not None and found.batches)


def may_call_kernels(op: Any, args: Sequence[Any]) -> bool:
    """Whether an op (a node's target) with these arguments may call kernels of torch."""
    found = _TABLE.get(op)
    return found is not None and found.kernels is not None and found.kernels(args)


def stacks_of(op: Any) -> Stacks | None:
    """How an op (a node's target) on lists takes stacks of entries; None if it does not."""
    found = _TABLE.get(op)
    return None if found is None else found.stacks


def registered() -> dict[torch._ops.OpOverload, Lowering]:
    """All lowerings, as a copy: for coverage tables and tests."""
    return dict(_TABLE)
