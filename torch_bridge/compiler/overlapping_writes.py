"""Writes into a tensor of what is made from other places of it, as `x[:, 1:] = x[:, :-1].clone()`.

XLA for the CPU (jaxlib 0.10) does some of them in place, where a later reshape adds a dim of size 1: it writes the first place, and reads it again for the
second one. Their lowerings are told to make a new array (`Lowering.writes`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from torch_bridge import lowerings

aten = torch.ops.aten
_READS = {
    aten.slice_scatter.default: (aten.slice.Tensor, aten.narrow_copy.default),
    aten.select_scatter.default: (aten.select.int, aten.select_copy.int),
}
"""By the op that writes a part of a tensor, those that read it: the second one where the start is an input (`passes.automatic_dynamic`)."""
APART = "apart"
"""Of a node's `meta`: True if what it writes is made from other places of what it writes into."""


def mark(graph: fx.Graph) -> None:
    """Mark such nodes."""
    bases = {n: _base(n) for n in graph.nodes if n.target in _READS}
    if bases:
        order = {n: k for k, n in enumerate(graph.nodes)}
        bits = {base: 1 << k for k, base in enumerate(dict.fromkeys(bases.values()))}
        made_from = _made_from(graph, bits)
        for node, base in bases.items():
            if made_from[node.args[1]] & bits[base] and _overlaps(node, base, order):
                node.meta[APART] = True


def _base(node: fx.Node) -> fx.Node:
    """What a write is into, without the views that it is seen through."""
    base: Any = node.args[0]
    while lowerings.is_view(base.target):
        base = base.args[0]
    return base


def _made_from(graph: fx.Graph, bits: dict[fx.Node, int]) -> dict[Any, int]:
    """The bits of the nodes that each node is made from, its own included."""
    found: dict[Any, int] = {}
    for node in graph.nodes:
        mask = bits.get(node, 0)
        for given in node.all_input_nodes:
            mask |= found[given]
        found[node] = mask
    return found


def _overlaps(node: fx.Node, base: fx.Node, order: dict[fx.Node, int]) -> bool:
    into: Any = node.args[0]
    reads = _READS[node.target]  # type: ignore[index]
    seen: set[tuple[fx.Node, bool]] = set()
    waiting: list[tuple[Any, bool]] = [(node.args[1], True)]
    while waiting:
        value, aligned = found = waiting.pop()
        if found in seen or order[value] < order[base]:
            continue  # what is older is not made from it
        seen.add(found)
        if value is base or value is into:
            return True
        if aligned and value.target in reads and _same(value.args[0], into) and _is_part(value, node):
            continue  # the same place
        waiting.extend((x, aligned and _keeps_places(value, x)) for x in value.all_input_nodes)
    return False


def _is_part(read: fx.Node, write: fx.Node) -> bool:
    """Whether a node reads the part that another one writes."""
    written = write.args[2:]
    if read.target is aten.narrow_copy.default:
        dim, start, length = read.args[1:]
        return written[:2] == (dim, start) and write.args[1].meta["val"].shape[dim] == length  # type: ignore[union-attr]
    return read.args[1:] == written


def _same(a: Any, b: Any) -> bool:
    """Whether two nodes are the same value read through the same views."""
    while a is not b:
        if a.target is not b.target or not lowerings.is_view(a.target) or (a.args[1:], a.kwargs) != (b.args[1:], b.kwargs):
            return False
        a, b = a.args[0], b.args[0]
    return True


def _keeps_places(node: fx.Node, of: fx.Node) -> bool:
    """Whether each element of a result is made from the one at the same place of an input, and no other of that input."""
    if node.target in _READS:
        return node.args[0] is of and node.args[1] is not of
    if torch.Tag.pointwise not in getattr(node.target, "tags", ()) and not lowerings.is_cast(node.target):
        return False
    found, given = node.meta.get("val"), of.meta.get("val")
    return isinstance(found, torch.Tensor) and isinstance(given, torch.Tensor) and found.shape == given.shape
