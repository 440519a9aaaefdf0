"""The collectives of a traced program: what every core sends, how often, along which mesh axes, and which line of which module asked for it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from nxd_jax.inspect import units
from nxd_jax.inspect.equations import Equation, equations, phase
from nxd_jax.inspect.tables import Column, Table

KINDS = {
    "psum": "all-reduce",
    "psum2": "all-reduce",
    "psum_invariant": "all-reduce",
    "pmax": "all-reduce",
    "pmin": "all-reduce",
    "all_gather": "all-gather",
    "all_gather_invariant": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "all_to_all": "all-to-all",
    "ragged_all_to_all": "all-to-all",
    "ppermute": "permute",
}
"""JAX's primitives and what the hardware's operations are called."""


@dataclass(frozen=True)
class Collective:
    """Collectives of one kind along the same mesh axes that the same line asks for, in one run of a program.

    kind: "all-reduce", "all-gather", "reduce-scatter", "all-to-all" or "permute". axes: the mesh axes, outermost first, without those of size 1.
    ranks: that take part in each; fewer than the axes hold for groups that are no lines of the mesh. count: how many. bytes: of all their inputs, on one
    core. dtype: of what is sent. module: the module's dotted path, with a star for the number of a layer in a loop. line: "file.py:12". op: the aten name.
    phase: "forward", "backward" or "outside" (of modules: the optimizer, gradients' reduction, the loop). `collectives` leaves the last five empty.
    stage: in a step of a pipeline the ranks along pp that send it, each as much: "0", "1-14", or "all together"; else "".
    """

    kind: str
    axes: tuple[str, ...]
    ranks: int
    count: int
    bytes: int
    dtype: str = ""
    module: str = ""
    line: str = ""
    op: str = ""
    phase: str = ""
    stage: str = ""

    @property
    def wire_bytes(self) -> float:
        """Bytes that a core puts on the wire for them on a ring: 2 (r-1)/r of an all-reduce's input, (r-1) times an all-gather's, (r-1)/r of a
        reduce-scatter's or all-to-all's, a permute's as they are."""
        r = self.ranks
        factor = {"all-reduce": 2 * (r - 1) / r, "all-gather": r - 1, "permute": 1}.get(self.kind, (r - 1) / r)
        return factor * self.bytes


COLUMNS = (
    Column("collective", "kind"),
    Column("along", lambda c: " x ".join(c.axes)),
    Column("ranks", "ranks", number=True),
    Column("count", "count", number=True),
    Column("per core", "bytes", units.size, number=True),
    Column("each", lambda c: c.bytes / c.count, units.size, number=True),
    Column("dtype", "dtype"),
    Column("phase", "phase"),
    Column("module", "module"),
    Column("line", "line"),
)


def table(jaxpr: Any, sizes: dict[str, int], most: int | None = 40) -> Table[Collective]:
    """The collectives of a closed jaxpr, one row for each kind, axes, dtype and place in the code, the most bytes first. sizes: of the mesh axes.

    A loop of known length counts every time round.
    """
    rows = summed(_found(equations(jaxpr), sizes, _place))
    total = sum(c.bytes for c in rows)
    note = (
        f"{units.many(sum(c.count for c in rows), 'collective')}, {units.size(total)} of inputs on each core"
        if rows
        else "no rank communicates"
    )
    return Table("Collectives", rows, COLUMNS, note, most)


def collectives(jaxpr: Any, sizes: dict[str, int]) -> tuple[Collective, ...]:
    """The same wherever they come from: one entry for each kind, axes and number of ranks."""
    return tuple(summed(_found(equations(jaxpr), sizes, lambda eqn: {})))


def summary(rows: Iterable[Collective]) -> tuple[Collective, ...]:
    """Rows of a table added up wherever they come from."""
    return tuple(summed(Collective(c.kind, c.axes, c.ranks, c.count, c.bytes) for c in rows))


def _place(eqn: Equation) -> dict[str, str]:
    scope = eqn.scope
    return {"dtype": eqn.inputs[0].dtype.name, "module": scope.module, "line": scope.line, "op": scope.op, "phase": phase(scope)}


def _found(eqns: Iterable[Equation], sizes: dict[str, int], place: Callable[[Equation], dict[str, str]]) -> Iterable[Collective]:
    for eqn in eqns:
        kind = KINDS.get(eqn.primitive)
        if kind is None:
            continue
        axes = tuple(a for a in _axes(eqn.params) if sizes.get(a, 1) > 1)
        groups = eqn.params.get("axis_index_groups")
        ranks = len(groups[0]) if groups else math.prod(sizes[a] for a in axes)
        if ranks > 1:
            count, size = eqn.times * len(eqn.inputs), eqn.times * sum(a.size * a.dtype.itemsize for a in eqn.inputs)
            yield Collective(kind, axes, ranks, count, size, **place(eqn))


def summed(found: Iterable[Collective]) -> list[Collective]:
    """One for each kind, axes, number of ranks, dtype and place, the most bytes first."""
    sums: dict[Collective, tuple[int, int]] = {}
    for c in found:
        key = Collective(c.kind, c.axes, c.ranks, 0, 0, c.dtype, c.module, c.line, c.op, c.phase)
        count, size = sums.get(key, (0, 0))
        sums[key] = count + c.count, size + c.bytes
    made = [Collective(k.kind, k.axes, k.ranks, *n, k.dtype, k.module, k.line, k.op, k.phase) for k, n in sums.items()]
    return sorted(made, key=lambda c: -c.bytes)


def _axes(params: dict[str, Any]) -> tuple[str, ...]:
    found = params.get("axes", params.get("axis_name", ()))
    return tuple(a for a in (found if isinstance(found, (tuple, list)) else (found,)) if isinstance(a, str))
