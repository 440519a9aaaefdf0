"""Which mesh axes every value of a graph varies over: from its inputs, and what each op does to them.

An op's result varies over all axes its inputs vary over. A reduction or a gather over whole axes removes those; a scatter, an exchange and each
rank's own number add theirs. It errs on the side of varying.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import fx

from torch_bridge import world
from torch_bridge.sharding import NONE, Axes


def spread(graph: fx.Graph, inputs: Sequence[Axes]) -> None:
    """Set `meta["axes"]` on every node, given the axes of the first placeholders (the leaves); numbers and draws agree on all ranks."""
    from torch_bridge import collective_ops, rank_ops

    every = frozenset(a for a, n in world.current().axes.items() if n > 1)
    supply = iter(inputs)
    for node in graph.nodes:
        if node.op == "placeholder":
            node.meta["axes"] = next(supply, NONE)
            continue
        axes: Axes = union(n.meta["axes"] for n in node.all_input_nodes)
        if node.target in collective_ops.COLLECTIVES:
            axes = _after(node, axes, every)
        elif node.target in rank_ops.TABLES:
            axes |= frozenset(world.axes_of_table(node.args[rank_ops.TABLES[node.target]]))
        extra = node.meta.get("draw_axes")
        node.meta["axes"] = axes | (frozenset(extra) & every) if extra else axes


def union(of: Iterable[Axes]) -> Axes:
    return NONE.union(*of)


def _after(node: fx.Node, axes: Axes, every: Axes) -> Axes:
    """The axes of a collective's result."""
    name = node.target._opname if hasattr(node.target, "_opname") else str(node.target)
    if name == "permute":
        return every
    text: Any = node.args[-1]
    explicit = text.startswith("[")
    over = every if explicit else frozenset(text.split(",")) & every
    if name in ("all_reduce", "all_gather", "broadcast"):
        return every if explicit else axes - over
    return axes | over
