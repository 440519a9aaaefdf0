"""A graph module of aten ops as a JAX computation: each node through its lowering, or through torch's own decomposition of it."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax import lax
from torch import fx

from torch_bridge import dtypes, lowerings, scopes, sharding
from torch_bridge.graph import KINDS, number
from torch_bridge.source import NOWHERE

KeyOf = Callable[[fx.Node], Any]
"""Gives the PRNG key of a random node."""


def run(
    graph: fx.Graph, inputs: Sequence[Any], key_of: KeyOf, owner: torch.nn.Module | None = None, store: Callable[[Any], Any] | None = None
) -> Any:
    """Evaluate the graph on JAX values for its placeholders, in order. `owner` holds what `get_attr` nodes name; `store` rounds the value of each node."""
    env: dict[fx.Node, Any] = {}
    last = _last_uses(graph)
    supply = iter(inputs)
    for node in graph.nodes:
        if node.op == "placeholder":
            env[node] = next(supply)
        elif node.op == "get_attr":
            env[node] = _attribute(owner, node.target)
        elif node.op == "call_function":
            env[node] = _call(node, env, key_of)
        if store is not None and node in env and "val" in node.meta:
            env[node] = store(env[node])
        elif node.op == "output":
            return fx.node.map_arg(node.args[0], lambda n: env[n])
        for dead in last.get(node, ()):
            del env[dead]
    raise AssertionError("graph without output")


def _last_uses(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    seen: set[fx.Node] = set()
    last: dict[fx.Node, list[fx.Node]] = {}
    for node in reversed(graph.nodes):
        for used in node.all_input_nodes:
            if used not in seen:
                seen.add(used)
                last.setdefault(node, []).append(used)
    return last


def _attribute(owner: torch.nn.Module | None, target: str) -> Any:
    from torch_bridge.transfer import to_array

    value: Any = owner
    for part in target.split("."):
        value = getattr(value, part)
    return to_array(value)


def _call(node: fx.Node, env: dict[fx.Node, Any], key_of: KeyOf) -> Any:
    values: list[Any] = []
    fx.node.map_arg((node.args, node.kwargs), lambda n: values.append(env[n]))
    return evaluate(node, values, lambda: key_of(node))


def evaluate(node: fx.Node, values: Iterable[Any], key: Callable[[], Any] | None = None, scope: str | None = None) -> Any:
    """One node's result. values: of the nodes among its arguments, as often as they stand there, in order; key: gives a random node's key; scope: its name."""
    supply = iter(values)
    filled: Any = fx.node.map_arg((node.args, node.kwargs), lambda n: next(supply))
    args, kwargs = filled
    if node.target is operator.getitem:
        return args[0][args[1]]
    if node.target is number:
        return dtypes.Scalar(KINDS[args[2]], args[0][args[1]])
    with jax.named_scope(scopes.name(node.meta.get("source", NOWHERE), node.target) if scope is None else scope):
        result = call(node.target, args, kwargs, key if "draw" in node.meta else None)
    return _conform(result, node)


def through(views: Iterable[fx.Node], value: Any) -> Any:
    """A value read through views, innermost first."""
    for view in views:
        value = evaluate(view, (value,))
    return value


def call(op: Any, args: Any, kwargs: Any, key: Callable[[], Any] | None) -> Any:
    """One aten op on JAX values."""
    found = lowerings.lookup(op)
    if found is None:
        from torch_bridge.fallback import lower_by_decomposition

        return lower_by_decomposition(op, args, kwargs, key)
    if found.rng:
        return found.fn(*args, **kwargs, key=None if key is None else key())
    return found.fn(*args, **kwargs)


def _conform(result: Any, node: fx.Node) -> Any:
    """Check shapes and settle dtypes against what torch's shape inference promised."""
    expected = node.meta.get("val")
    if isinstance(expected, torch.Tensor) and not isinstance(result, (list, tuple)):
        if tuple(result.shape) != tuple(expected.shape):
            raise AssertionError(f"the lowering of {node.target} gave shape {tuple(result.shape)}, torch gives {tuple(expected.shape)}")
        return dtypes.cast(result, dtypes.to_jax(expected.dtype))
    return result


def draw_key(row: Any) -> Any:
    """The PRNG key of one row of `draws`: uint32 (seed high, seed low, offset high, offset low)."""
    key = jax.random.wrap_key_data(row[:2], impl="threefry2x32")
    return jax.random.fold_in(jax.random.fold_in(key, row[2]), row[3])


def draws_key_of(draws: Any) -> KeyOf:
    """Keys for the random nodes of a recorded graph, from its `draws` input."""
    return lambda node: key_of_row(jnp.asarray(draws)[node.meta["draw"]], node.meta.get("axes", ()))


def key_of_row(row: Any, axes: Any) -> Any:
    """The key of a row of `draws`, each rank's own along mesh axes."""
    return _on_axes(draw_key(row), axes)


def _on_axes(key: Any, axes: Any) -> Any:
    """A key of each rank's own along the mesh axes that a result varies over: ranks that share a value draw the same numbers."""
    names = sharding.ordered(axes)
    return jax.random.fold_in(key, jax.lax.axis_index(names)) if names else key


def dtype_of(val: torch.Tensor) -> Any:
    """JAX's dtype of a meta tensor."""
    return dtypes.to_jax(val.dtype)


def strong(x: Any) -> Any:
    """The value with a dtype that does not give way to others, as loops need it."""
    return lax.convert_element_type(x, x.dtype)
