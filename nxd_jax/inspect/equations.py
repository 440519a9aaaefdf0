"""The equations of a traced program, also those inside others: how often each runs, and which line of which module it comes from."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch_bridge.ir import scopes
from torch_bridge.ir.scopes import Scope


class Equation(NamedTuple):
    """An equation of a jaxpr. primitive: its name. inputs, outputs: abstract values (`shape`, `size`, `dtype`) as one core has them. times: how often it runs.

    known: false inside a loop whose length is not known before it runs, which counts as one round.
    """

    primitive: str
    params: dict[str, Any]
    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]
    times: int
    scope: Scope
    known: bool = True


def equations(jaxpr: object, cores: int = 1) -> Iterator[Equation]:
    """Every equation that computes, those of calls, loops and branches in place of the call. Of a conditional every branch counts; of
    what is computed otherwise on one platform (CPUs, mostly) what is computed on all others does: it is what the op is, and what an accelerator does.

    cores: how often what a `shard_map` computes on one core counts: in an annotated program, whose other equations are those of whole tensors.
    """
    yield from _walk(getattr(jaxpr, "jaxpr", jaxpr), 1, scopes.NONE, True, cores)


def phase(scope: Scope) -> str:
    """When a scope's op runs: "forward", "backward", or "outside" modules (the optimizer, the reduction of gradients, the loop itself)."""
    if scope.backward:
        return "backward"
    return "forward" if scope.module else "outside"


def _walk(jaxpr: Any, times: int, outer: Scope, known: bool, cores: int) -> Iterator[Equation]:
    for eqn in jaxpr.eqns:
        own = scopes.read(str(eqn.source_info.name_stack))
        scope = own if own != scopes.NONE else outer
        name = eqn.primitive.name
        nested = list(_nested(_on_accelerators(eqn.params)))
        if not nested or name in ("reduce", "reduce_window", "scatter", "scatter-add", "sort", "argmax", "argmin", "custom_jvp_call"):
            nested = nested if name == "custom_jvp_call" else []
        if not nested:
            inputs, outputs = (tuple(v.aval for v in vs) for vs in (eqn.invars, eqn.outvars))
            yield Equation(name, eqn.params, inputs, outputs, times, scope, known)
        inner = times * (eqn.params["length"] if name == "scan" else cores if name == "shard_map" else 1)
        for each in nested:
            yield from _walk(each, inner, scope, known and name != "while", cores)


def _on_accelerators(params: dict[str, Any]) -> dict[str, Any]:
    """Of `lax.platform_dependent` the default alone; for a grouped product, whose default loops over as many blocks as there are rows, the ragged one."""
    platforms = params.get("branches_platforms")
    if platforms is None or None not in platforms:
        return params
    branches = params["branches"]
    ragged = [b for b in branches if _has(b, "ragged_dot_general")]
    return params | {"branches": (ragged[0] if ragged else branches[platforms.index(None)],)}


def _has(jaxpr: Any, primitive: str) -> bool:
    """Whether there is such an equation, in functions that it calls, too."""
    return any(
        eqn.primitive.name == primitive or any(_has(each, primitive) for each in _nested(eqn.params))
        for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns
    )


def _nested(params: dict[str, Any]) -> Iterator[Any]:
    for key, value in params.items():
        if key in ("jvp_jaxpr_fun", "jvp_jaxpr_thunk", "fwd_jaxpr_thunk", "bwd"):
            continue
        for each in value if isinstance(value, (tuple, list)) else (value,):
            inside = getattr(each, "jaxpr", each)
            if hasattr(inside, "eqns"):
                yield inside
