"""A traced JAX function (a jaxpr) evaluated again, primitive by primitive, by rules of one's own: calls, loops and branches included."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from torch_bridge import _compat

Rule = Callable[[Any, list[Any]], list[Any]]
"""Gives the results of an equation for the values of its operands."""

Run = Callable[[Any, Sequence[Any], Any], list[Any]]
"""Gives the results of an inner jaxpr for its inputs. The last argument: the number of the turn in a loop (uint32), None in a branch."""

_CALLS = {"jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr", "core_call": "call_jaxpr", "remat": "jaxpr", "remat2": "jaxpr",
          "checkpoint": "jaxpr", "custom_jvp_call": "call_jaxpr", "custom_vjp_call": "call_jaxpr", "custom_vjp_call_jaxpr": "fun_jaxpr",
          "custom_vmap_call": "call"}  # fmt: skip


def traced(run: Callable[..., Any], inputs: Sequence[Any], results: Callable[[Any, list[Any]], list[Any]]) -> Any:
    """`run(*inputs)`, with the results that are made of its jaxpr and the flat inputs."""
    closed, shape = jax.make_jaxpr(run, return_shape=True)(*inputs)
    return jax.tree.unflatten(jax.tree.structure(shape), results(closed, jax.tree.leaves(tuple(inputs))))


def evaluate(jaxpr: Any, inputs: Sequence[Any], rule: Rule) -> list[Any]:
    """The results of a jaxpr, each equation by the rule, in its scope. Values are whatever the rule makes of them."""
    from jax.extend import core  # brings Pallas in

    jaxpr, consts = (jaxpr.jaxpr, jaxpr.consts) if isinstance(jaxpr, core.ClosedJaxpr) else (jaxpr, ())
    env: dict[Any, Any] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *inputs], strict=True))

    def read(v: Any) -> Any:
        return np.asarray(v.val, v.aval.dtype) if isinstance(v, core.Literal) else env[v]  # type: ignore[attr-defined]

    for eqn in jaxpr.eqns:
        with jax.named_scope(str(eqn.source_info.name_stack)):
            results = rule(eqn, [read(v) for v in eqn.invars])
        env.update(zip(eqn.outvars, results, strict=True))
    return [read(v) for v in jaxpr.outvars]


def called(eqn: Any) -> Any:
    """The jaxpr that an equation is a mere call of; None: it is something else."""
    name = _CALLS.get(eqn.primitive.name)
    return None if name is None else eqn.params[name]


def bind(eqn: Any, values: Sequence[Any], **changed: Any) -> list[Any]:
    """The results of an equation's primitive, with some of its parameters changed."""
    params = eqn.primitive.get_bind_params({**eqn.params, **changed})
    results = eqn.primitive.bind(*values, **params)
    return list(results) if eqn.primitive.multiple_results else [results]


def structured(eqn: Any, values: Sequence[Any], run: Run) -> list[Any] | None:
    """The results of a loop or a branch, whose inner jaxprs `run` evaluates; None: it is neither."""
    build = _STRUCTURED.get(eqn.primitive.name)
    return None if build is None else build(eqn.params, values, run)


def _scan(params: Any, values: Sequence[Any], run: Run) -> list[Any]:
    n_consts, n_carry = _compat.scan_parts(params)
    consts, carry, xs = values[:n_consts], values[n_consts : n_consts + n_carry], values[n_consts + n_carry :]

    def body(state: Any, x: Any) -> Any:
        i, *own = state
        results = run(params["jaxpr"], [*consts, *own, *x], i)
        return (i + np.uint32(1), *results[:n_carry]), results[n_carry:]

    start = (jnp.uint32(0), *carry)
    (_, *last), stacked = lax.scan(body, start, list(xs), length=params["length"], reverse=params["reverse"], unroll=params["unroll"])
    return [*last, *stacked]


def _while(params: Any, values: Sequence[Any], run: Run) -> list[Any]:
    n_test, n_body = params["cond_nconsts"], params["body_nconsts"]
    of_test, of_body, start = values[:n_test], values[n_test : n_test + n_body], values[n_test + n_body :]

    def goes_on(state: Any) -> Any:
        return run(params["cond_jaxpr"], [*of_test, *state[1:]], state[0])[0]

    def turn(state: Any) -> Any:
        return (state[0] + np.uint32(1), *run(params["body_jaxpr"], [*of_body, *state[1:]], state[0]))

    return list(lax.while_loop(goes_on, turn, (jnp.uint32(0), *start))[1:])


def _cond(params: Any, values: Sequence[Any], run: Run) -> list[Any]:
    def branch(jaxpr: Any) -> Callable[..., Any]:
        return lambda *operands: run(jaxpr, operands, None)

    return list(lax.switch(values[0], [branch(j) for j in params["branches"]], *values[1:]))


_STRUCTURED: dict[str, Callable[[Any, Sequence[Any], Run], list[Any]]] = {"scan": _scan, "while": _while, "cond": _cond}
