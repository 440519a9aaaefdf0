"""Operations and bytes of a traced program, by module, line, op or phase."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from nxd_jax.inspect import units
from nxd_jax.inspect.collectives import KINDS
from nxd_jax.inspect.equations import Equation, equations, phase
from nxd_jax.inspect.tables import Column, Table

BY = ("module", "line", "op", "phase")

_FREE = {
    "reshape", "broadcast_in_dim", "squeeze", "expand_dims", "stop_gradient", "copy", "copy_p", "axis_index", "iota", "optimization_barrier",
    "random_wrap", "random_unwrap", "pvary", "sharding_constraint", "reduce_precision",
}  # fmt: skip
_MOVES = {
    "transpose", "slice", "dynamic_slice", "dynamic_update_slice", "concatenate", "pad", "gather", "rev", "convert_element_type",
    "bitcast_convert_type", "select_n", "sort", "scatter",
}  # fmt: skip


@dataclass(frozen=True)
class Cost:
    """What the ops of one place do on one core in one run of a program.

    module, line, op, phase: the place; those that are not told apart are "". flops: multiplications and additions of matrix products and convolutions; other:
    elementwise operations and reductions, one for each element. bytes: of the inputs and results of every op, as if none were fused (an upper bound of what
    memory sees). calls: ops, those in loops every time round.
    """

    module: str
    line: str
    op: str
    phase: str
    flops: int
    other: int
    bytes: int
    calls: int


@dataclass(frozen=True)
class Costs:
    """The costs of every place. rows: by module, line, op and phase. complete: false if there is a loop whose length is known only when it runs (it counts as
    one round). `costs.by("module", depth=2)` gives a table."""

    rows: tuple[Cost, ...]
    complete: bool = True

    @property
    def flops(self) -> int:
        """Of matrix products and convolutions, on one core."""
        return sum(r.flops for r in self.rows)

    @property
    def other(self) -> int:
        """Elementwise operations and reductions, on one core."""
        return sum(r.other for r in self.rows)

    @property
    def bytes(self) -> int:
        """Read and written by every op as if none were fused, on one core."""
        return sum(r.bytes for r in self.rows)

    def by(self, *keys: str, depth: int | None = None, most: int | None = 40) -> Table[Cost]:
        """A table with one row for each of these, the most operations first: "module" (default), "line", "op", "phase", or several.

        depth: parts of module paths that are told apart (None: all). most: rows that are shown. Raises ValueError for another key.
        """
        wanted = keys or ("module",)
        wrong = [k for k in wanted if k not in BY]
        if wrong:
            raise ValueError(f"by({', '.join(map(repr, keys))}): {wrong[0]!r} must be one of {', '.join(map(repr, BY))}")
        rows = _summed(self.rows, wanted, depth)
        note = f"{units.count(self.flops)} FLOP in products, {units.count(self.other)} other operations on one core"
        if not self.complete:
            note += "; loops whose length is known only when they run count as one round"
        return Table(f"Operations by {' and '.join(wanted)}", rows, _columns(wanted, self.flops), note, most)

    def __str__(self) -> str:
        return str(self.by())

    def _repr_html_(self) -> str:
        return self.by().html()


def costs(jaxpr: Any, cores: int = 1) -> Costs:
    """The costs of a closed jaxpr, as one core runs it; of an annotated program on all of its `cores` together."""
    found = list(equations(jaxpr, cores))
    rows = (_cost(eqn) for eqn in found if eqn.primitive not in _FREE and eqn.primitive not in KINDS)
    return Costs(tuple(_summed(rows, BY, None)), all(eqn.known for eqn in found))


def _cost(eqn: Equation) -> Cost:
    products = 0 if eqn.scope.op in _SUMS else flops(eqn)
    moved = sum(a.size * a.dtype.itemsize for a in (*eqn.inputs, *eqn.outputs))
    elements = 0 if products or eqn.primitive in _MOVES else max((a.size for a in (*eqn.inputs, *eqn.outputs)), default=0)
    scope, n = eqn.scope, eqn.times
    return Cost(scope.module, scope.line, scope.op, phase(scope), n * products, n * elements, n * moved, n)


def flops(eqn: Equation) -> int:
    """Multiplications and additions of a matrix product or convolution, once; 0 for anything else.

    Of a convolution those with elements of its input: none for padding, nor for the holes that a transposed or strided one's gradient puts between them. Of a
    product with ragged groups (`torch._grouped_mm`) those of all rows, whichever group they are in.
    """
    if eqn.primitive in _PRODUCTS:
        numbers = eqn.params[_PRODUCTS[eqn.primitive]]
        groups = getattr(numbers, "rhs_group_dimensions", ())
        (_, contracted), (_, batch) = getattr(numbers, "dot_dimension_numbers", numbers)
        left, right = (a.shape for a in eqn.inputs[:2])
        return 2 * math.prod(left) * math.prod(n for d, n in enumerate(right) if d not in (*contracted, *batch, *groups))
    if eqn.primitive == "conv_general_dilated":
        numbers, kernel = eqn.params["dimension_numbers"], eqn.inputs[1].shape
        batch, features, *_ = (eqn.outputs[0].shape[d] for d in numbers.out_spec)
        return 2 * batch * features * kernel[numbers.rhs_spec[1]] * math.prod(_pairs(eqn))
    return 0


_SUMS = ("aten.native_layer_norm", "aten.native_layer_norm_backward")
"""Ops whose products are sums over rows, written as products for XLA's sake (`torch_bridge.lowerings.normalization`)."""
_PRODUCTS = {"dot_general": "dimension_numbers", "ragged_dot_general": "ragged_dot_dimension_numbers"}


def _pairs(eqn: Equation) -> Iterator[int]:
    """For each spatial dim of a convolution: how many pairs of a place in the result and one in the window meet an element of the input."""
    p, numbers = eqn.params, eqn.params["dimension_numbers"]
    places = zip(numbers.lhs_spec[2:], numbers.rhs_spec[2:], numbers.out_spec[2:], strict=True)
    settings = zip(p["window_strides"], p["padding"], p["lhs_dilation"], p["rhs_dilation"], strict=True)
    for (i, k, o), (stride, (before, _), hole, apart) in zip(places, settings, strict=True):
        starts = np.arange(eqn.outputs[0].shape[o])[:, None] * stride - before
        at = starts + np.arange(eqn.inputs[1].shape[k]) * apart
        yield int(((at >= 0) & (at <= (eqn.inputs[0].shape[i] - 1) * hole) & (at % hole == 0)).sum())


def _summed(rows: Iterable[Cost], keys: Iterable[str], depth: int | None) -> list[Cost]:
    wanted = set(keys)
    sums: dict[tuple[str, ...], list[int]] = {}
    for r in rows:
        module = r.module if depth is None else ".".join(r.module.split(".")[:depth])
        key = tuple(v if k in wanted else "" for k, v in zip(BY, (module, r.line, r.op, r.phase), strict=True))
        total = sums.setdefault(key, [0, 0, 0, 0])
        for i, n in enumerate((r.flops, r.other, r.bytes, r.calls)):
            total[i] += n
    made = [Cost(*(*key, *numbers)) for key, numbers in sums.items()]  # type: ignore[arg-type]
    return sorted(made, key=lambda c: (-c.flops, -c.bytes))


def _columns(keys: Iterable[str], total: int) -> list[Column]:
    names = [Column(k, k, lambda text, k=k: text or ("(outside modules)" if k == "module" else "-")) for k in keys]  # type: ignore[misc]
    return [
        *names,
        Column("product FLOP", "flops", units.count, number=True),
        Column("share", lambda c: units.share(c.flops, total), number=True),
        Column("other ops", "other", units.count, number=True),
        Column("bytes, unfused", "bytes", units.size, number=True),
        Column("calls", "calls", units.count, number=True),
    ]
