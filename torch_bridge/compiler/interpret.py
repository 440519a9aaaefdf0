"""A graph module of aten ops as a JAX computation: each node through its lowering, or through torch's own decomposition of it."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from types import MappingProxyType
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import torch
from jax import lax
from torch import fx

from torch_bridge import lowerings
from torch_bridge.compiler import overlapping_writes, stored_results
from torch_bridge.config.settings import SETTINGS
from torch_bridge.ir import dtypes, scopes
from torch_bridge.ir.graph import KINDS, number
from torch_bridge.lowerings import random_keys, traced_once
from torch_bridge.lowerings.matmul import Transposed
from torch_bridge.mesh import random_state, sharding, world
from torch_bridge.mesh.axis_numbers import own
from torch_bridge.passes.verify import report
from torch_bridge.precision import precision_mode
from torch_bridge.precision.precision_mode import Mode
from torch_bridge.source import NOWHERE


class Blocks(Protocol):
    """Who evaluates nodes whose values are one for each device (`manual_blocks.Blocks`)."""

    def has(self, node: fx.Node) -> bool: ...

    def evaluate(self, node: fx.Node, given: Sequence[Any], mode: Mode) -> Any: ...


KeyOf = Callable[[fx.Node], Any]
"""Gives the PRNG key of a random node."""


def run(
    graph: fx.Graph,
    inputs: Sequence[Any],
    key_of: KeyOf,
    attribute: Callable[[str], Any] | None = None,
    store: Callable[[Any], Any] | None = None,
    mode: Mode | None = None,
    transposed: Mapping[fx.Node, Sequence[int]] = MappingProxyType({}),
    kept: Set[fx.Node] = frozenset(),
    blocks: Blocks | None = None,
) -> Any:
    """Evaluate the graph on JAX values for its placeholders, in order.

    `attribute` gives the arrays that `get_attr` nodes name (`transfer.attributes_of`); `store` rounds the value of each node.
    `transposed`: by node, the places of operands that are read as they lie before they are transposed (`transposed_products`).
    `kept`: nodes whose values XLA is to compute as they are, and not to merge into the ops that read them.
    `blocks` evaluates the nodes of regions of manual sharding (`manual_blocks`).
    `mode` is the precision that lowerings are told of; None: what the environment asks for now.
    """
    mode = precision_mode.current() if mode is None else mode
    env: dict[fx.Node, Any] = {}
    last = last_uses(graph, transposed)
    overlapping_writes.mark(graph)
    supply = iter(inputs)
    for node in graph.nodes:
        if node.op == "placeholder":
            env[node] = next(supply)
        elif node.op == "get_attr":
            assert attribute is not None, node.target
            env[node] = attribute(node.target)
        elif node.op == "call_function":
            if blocks is not None and blocks.has(node):
                env[node] = blocks.evaluate(node, _inputs(node, env), mode)
            else:
                env[node] = _call(node, env, key_of, mode, transposed.get(node, ()))
        if node in kept:
            env[node] = lax.optimization_barrier(env[node])
        if store is not None and node in env and "val" in node.meta:
            env[node] = store(env[node])
        elif node.op == "output":
            return fx.node.map_arg(node.args[0], lambda n: env[n])
        for dead in last.get(node, ()):
            del env[dead]
    raise AssertionError("graph without output")


def last_uses(graph: fx.Graph, transposed: Mapping[fx.Node, Sequence[int]] = MappingProxyType({})) -> dict[fx.Node, list[fx.Node]]:
    """By node, the nodes that nobody reads after it."""
    seen: set[fx.Node] = set()
    last: dict[fx.Node, list[fx.Node]] = {}
    for node in reversed(graph.nodes):
        for used in (*node.all_input_nodes, *(_lying(node, at) for at in transposed.get(node, ()))):
            if used not in seen:
                seen.add(used)
                last.setdefault(node, []).append(used)
    return last


def _lying(node: fx.Node, at: int) -> fx.Node:
    """What the transpose among a node's operands is one of."""
    operand: Any = node.args[at]
    return operand.args[0]


def _inputs(node: fx.Node, env: dict[fx.Node, Any]) -> list[Any]:
    values: list[Any] = []
    fx.node.map_arg((node.args, node.kwargs), lambda n: values.append(env[n]))
    return values


def _call(node: fx.Node, env: dict[fx.Node, Any], key_of: KeyOf, mode: Mode, transposed: Sequence[int] = ()) -> Any:
    values = _inputs(node, env)
    for at in transposed:
        values[at] = Transposed(env[_lying(node, at)])
    return evaluate(node, values, lambda: key_of(node), mode=mode)


def evaluate(
    node: fx.Node, values: Iterable[Any], key: Callable[[], Any] | None = None, scope: str | None = None, *, mode: Mode | None = None
) -> Any:
    """One node's result.

    values: of the nodes among its arguments, as often as they stand there, in order. key: gives a random node's key. scope: its name.
    mode: the precision of the program; only numbers, views and entries of lists do without.
    """
    supply = iter(values)
    filled: Any = fx.node.map_arg((node.args, node.kwargs), lambda n: next(supply))
    args, kwargs = filled
    if node.target is operator.getitem:
        return _conform(args[0][args[1]], node) if SETTINGS.verify else args[0][args[1]]
    if node.target is number:
        return dtypes.Scalar(KINDS[args[2]], args[0][args[1]])
    with jax.named_scope(scopes.name(node.meta.get("source", NOWHERE), node.target) if scope is None else scope):
        if stored_results.STORED in node.meta:
            result = stored_results.call(node.target, *args)
        else:
            apart = node.meta.get(overlapping_writes.APART, False)
            result = call(node.target, args, kwargs, key if "draw" in node.meta else None, mode, apart)
    return _conform(result, node)


def through(views: Iterable[fx.Node], value: Any) -> Any:
    """A value read through views, innermost first."""
    for view in views:
        value = evaluate(view, (value,))
    return value


Decompose = Callable[[Any, Any, Any, Callable[[], Any] | None, Mode], Any]
_decompose: Decompose | None = None


def decompose_with(decompose: Decompose) -> None:
    """Say how an op without a lowering is evaluated, through torch's own decomposition (`fallback.lower_by_decomposition`)."""
    global _decompose
    _decompose = decompose


def call(op: Any, args: Any, kwargs: Any, key: Callable[[], Any] | None, mode: Mode | None, apart: bool = False) -> Any:
    """One aten op on JAX values, with what its lowering wants besides. apart: of a write, see `Lowering.writes`."""
    found = lowerings.lookup(op)
    if found is None:
        assert _decompose is not None and mode is not None, f"{op} has no lowering"
        return _decompose(op, args, kwargs, key, mode)
    more: dict[str, Any] = {}
    if found.rng:
        more["key"] = None if key is None else key()
    if found.writes:
        more["apart"] = apart
    if found.mode:
        assert mode is not None, f"the lowering of {op} depends on the precision of the program, which nobody gave"
        more["mode"] = mode
    if found.once:
        return traced_once.call(found.fn, args, {**kwargs, **more})
    return found.fn(*args, **kwargs, **more)


def _conform(result: Any, node: fx.Node) -> Any:
    """Check shapes and settle dtypes against what torch's shape inference promised."""
    expected = node.meta.get("val")
    if result is None and not node.users:  # a gradient that `output_mask` leaves out, which only `SETTINGS.verify` looks at
        return None
    if isinstance(expected, torch.Tensor) and not isinstance(result, (list, tuple)):
        if tuple(result.shape) != tuple(expected.shape):
            raise AssertionError(f"the lowering of {node.target} gave shape {tuple(result.shape)}, torch gives {tuple(expected.shape)}")
        picked = node.target is operator.getitem and not node.meta.get("converted")
        if SETTINGS.verify and picked and result.dtype != dtypes.to_jax(expected.dtype):
            rule = "a result has the dtype that torch gives it"
            report.fail("interpret", rule, f"{result.dtype} for {expected.dtype}", f"{report.in_graph(node)}, of {node.args[0]}")
        return dtypes.cast(result, dtypes.to_jax(expected.dtype))
    return result


def draw_key(row: Any, differences: Sequence[int] | None = None) -> Any:
    """The PRNG key of one row of `draws`: uint32 (seed high, seed low, offset high, offset low). differences: what each rank's seed is larger by."""
    high0, low0, high1, low1 = row.astype(jnp.uint64)
    seed = high0 << 32 | low0
    if differences:
        seed = seed + own(differences, jnp.int64).astype(jnp.uint64)
    return random_keys.from_seed(seed, high1 << 32 | low1)


def draws_key_of(draws: Any) -> KeyOf:
    """Keys for the random nodes of a recorded graph, from its `draws` input."""
    return lambda node: key_of_row(lax.index_in_dim(jnp.asarray(draws), node.meta["draw"], keepdims=False), node)


def key_of_row(row: Any, node: fx.Node) -> Any:
    """The key of a random node from its row of `draws`: each rank's own where its seed is, and along the mesh axes that the result varies over otherwise."""
    meta = node.meta
    asked = meta.get("draw_axes") or ()
    differences = random_state.seed_differences(asked)
    own_seeds = "key_axes" in meta and bool(differences)
    key = draw_key(row, differences) if own_seeds else traced_once.call(draw_key, (row,), {})
    return _on_axes(key, meta.get("key_axes", ()), () if differences else random_state.names(asked))


def _on_axes(key: Any, axes: Any, asked: Sequence[str]) -> Any:
    """A key of each rank's own along mesh axes. asked: axes along which ranks are to differ in any case, also where only one index of them is there."""
    now = world.current()
    fixed = [name for name in asked if name in now.at]
    if now.within is None or not fixed:
        names = sharding.ordered(axes)
        return random_keys.fold_in(key, jax.lax.axis_index(names)) if names else key
    index: Any = 0
    for name, size in now.within.axes.items():
        if name in fixed or name in axes:
            index = index * size + (now.at[name] if name in fixed else jax.lax.axis_index(name))
    return random_keys.fold_in(key, index)


def dtype_of(val: torch.Tensor) -> Any:
    """JAX's dtype of a meta tensor."""
    return dtypes.to_jax(val.dtype)


def strong(x: Any) -> Any:
    """The value with a dtype that does not give way to others, as loops need it."""
    return lax.convert_element_type(x, x.dtype)
