"""Which mesh axes every value of a graph varies over: from its inputs, and what each op does to them.

An op's result varies over all axes that its inputs vary over. What else an op does (collectives by their `AxesRule`, each rank's own number by its table,
ops on lists entry by entry) is said where it is registered. It errs on the side of varying.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

from torch import fx

from torch_bridge import lowerings
from torch_bridge.lowerings import AxesRule
from torch_bridge.mesh import group_axes, random_state, world
from torch_bridge.mesh.sharding import NONE, Axes

_UNKNOWN = lowerings.Lowering(None)  # type: ignore[arg-type]


def spread(graph: fx.Graph, inputs: Sequence[Axes]) -> None:
    """Set `meta["axes"]` on every node, given the axes of the first placeholders (the leaves); numbers and draws agree on all ranks.

    A random op also gets `meta["key_axes"]`: the axes along which ranks draw different numbers.
    """
    every = frozenset(a for a, n in world.current().axes.items() if n > 1)
    supply = iter(inputs)
    independent = random_state.independent()
    for node in graph.nodes:
        if node.op == "placeholder":
            node.meta["axes"] = next(supply, NONE)
            continue
        axes: Axes = union(n.meta["axes"] for n in node.all_input_nodes)
        op = lowerings.lookup(node.target) or _UNKNOWN
        if op.entrywise:
            found = _of_each(node)
            node.meta["each"] = [_after(node, a, every) for a in found] if op.collective else found
        elif node.target is operator.getitem and "each" in node.args[0].meta:
            axes = _picked(node, axes)
        if op.collective:
            axes = _after(node, axes, every)
        elif op.rank_table is not None:
            axes |= frozenset(world.axes_of_table(node.args[op.rank_table]))
        extra = node.meta.get("draw_axes") or ()
        own = frozenset(extra) & every
        node.meta["axes"] = axes | own
        if "draw" in node.meta:
            shared = axes if independent else NONE
            node.meta["key_axes"] = shared if random_state.seed_differences(extra) else shared | own


def _of_each(node: fx.Node) -> list[Axes]:
    """For each entry of the lists that an op takes: the axes of that entry in all of them, and of whatever is no list."""
    given = [*node.args, *node.kwargs.values()]
    lists = [x for x in given if isinstance(x, (list, tuple))]
    shared = union(x.meta["axes"] for x in given if isinstance(x, fx.Node))
    count = len(lists[0])
    return [shared.union(*(x[k].meta["axes"] for x in lists if len(x) == count and isinstance(x[k], fx.Node))) for k in range(count)]


def _picked(node: fx.Node, axes: Axes) -> Axes:
    """The axes of an entry of an op's lists of results; a list itself (the first of two steps) passes its entries' on."""
    source: Any = node.args[0]
    if source.target is not operator.getitem and len(source.target._schema.returns) > 1:
        node.meta["each"] = source.meta["each"]
        return axes
    return source.meta["each"][node.args[1]]


def union(of: Iterable[Axes]) -> Axes:
    return NONE.union(*of)


def _after(node: fx.Node, axes: Axes, every: Axes) -> Axes:
    """The axes of a collective's result."""
    op = lowerings.lookup(node.target)
    assert op is not None and op.axes is not None, node.target
    if op.axes is AxesRule.EVERY:
        return every
    text: Any = node.args[-1]
    if not text.startswith("["):
        over = frozenset(text.split(",")) & every
        return axes - over if op.axes is AxesRule.REMOVES else axes | over
    named = group_axes.of(text)
    found = (axes | named.uneven) & every
    return found & named.apart if op.axes is AxesRule.REMOVES else found
