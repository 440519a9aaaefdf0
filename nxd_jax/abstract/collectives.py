"""The collectives of a traced program: what every core sends, how often, along which mesh axes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

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
    """Collectives of one kind along the same mesh axes, in one run of a program.

    kind: "all-reduce", "all-gather", "reduce-scatter", "all-to-all" or "permute". axes: the mesh axes, outermost first, without those of size 1.
    ranks: that take part in each; fewer than the axes hold for groups that are no lines of the mesh. count: how many. bytes: of all their inputs, on one
    core.
    """

    kind: str
    axes: tuple[str, ...]
    ranks: int
    count: int
    bytes: int


def collectives(jaxpr: Any, sizes: dict[str, int]) -> tuple[Collective, ...]:
    """What a closed jaxpr communicates, the most bytes first. sizes: of the mesh axes. A loop of known length counts every time round."""
    sums: dict[tuple[str, tuple[str, ...], int], tuple[int, int]] = {}
    for eqn, times in _equations(getattr(jaxpr, "jaxpr", jaxpr), 1):
        kind = KINDS.get(eqn.primitive.name)
        axes = tuple(a for a in _axes(eqn.params) if sizes.get(a, 1) > 1)
        groups = eqn.params.get("axis_index_groups")
        ranks = len(groups[0]) if groups else math.prod(sizes[a] for a in axes)
        if kind is None or ranks == 1:
            continue
        key = kind, axes, ranks
        count, total = sums.get(key, (0, 0))
        sums[key] = count + times * len(eqn.invars), total + times * sum(_bytes(v.aval) for v in eqn.invars)
    found = [Collective(*key, count, total) for key, (count, total) in sums.items()]
    return tuple(sorted(found, key=lambda c: -c.bytes))


def _equations(jaxpr: Any, times: int) -> Iterator[tuple[Any, int]]:
    """Every equation, also those inside others, and how often it runs."""
    for eqn in jaxpr.eqns:
        yield eqn, times
        inner = times * eqn.params["length"] if eqn.primitive.name == "scan" else times
        for value in eqn.params.values():
            for each in value if isinstance(value, (tuple, list)) else (value,):
                nested = getattr(each, "jaxpr", each)
                if hasattr(nested, "eqns"):
                    yield from _equations(nested, inner)


def _axes(params: dict[str, Any]) -> tuple[str, ...]:
    found = params.get("axes", params.get("axis_name", ()))
    return tuple(a for a in (found if isinstance(found, (tuple, list)) else (found,)) if isinstance(a, str))


def _bytes(aval: Any) -> int:
    return math.prod(aval.shape) * aval.dtype.itemsize
