"""The same results read of every op of several results that a loop over time calls: the last step's cell gives a gradient that nobody reads.

A step that reads one result less is no step like the others, and would be computed outside of their loop (`find_repeats`).
"""

from __future__ import annotations

import operator
from collections import Counter, defaultdict
from typing import Any

from torch import fx

from torch_bridge.ir.graph import put_after
from torch_bridge.passes.find_repeats import aval, edges, plain


def rewrite(graph: fx.Graph, fewest: int) -> None:
    """Read of each op what most of so many like it give. The new reads have no users."""
    alike: dict[Any, list[fx.Node]] = defaultdict(list)
    for node in graph.nodes:
        if node.op == "call_function" and "val" not in node.meta and node.target is not operator.getitem:
            alike[node.target, plain(node), tuple(aval(e.source) for e in edges(node))].append(node)
    for nodes in alike.values():
        if len(nodes) >= fewest:
            _even(graph, nodes)


def _even(graph: fx.Graph, nodes: list[fx.Node]) -> None:
    read = [{user.args[1]: user for user in node.users} for node in nodes if all(u.target is operator.getitem for u in node.users)]
    counts = Counter(index for found in read for index in found)
    for index, count in counts.items():
        if len(nodes) // 2 < count < len(nodes) and len(read) == len(nodes):
            model = next(found[index] for found in read if index in found)
            for node, found in zip(nodes, read, strict=True):
                if index not in found:
                    before = [n for k, n in found.items() if k < index]  # type: ignore[operator]
                    found[index] = put_after(graph, max(before, default=node), operator.getitem, (node, index), model.meta)
