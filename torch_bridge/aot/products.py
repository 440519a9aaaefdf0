"""Products with transposed weights, as `x @ w.t()` records them, as one op that contracts the last dims.

XLA for CPUs makes a loop of a row times a transposed matrix, and in it computes what the row is made of, such as a GELU, once for each output.
"""

from __future__ import annotations

import torch
from torch import fx

aten = torch.ops.aten


def contract(graph: fx.Graph) -> None:
    """Put `aten.linear` in the place of `aten.mm` by a transposed matrix."""
    for node in graph.nodes:
        if node.target is aten.mm.default and _is_transposed(node.args[1]):
            node.target = aten.linear.default
            node.args = (node.args[0], node.args[1].args[0])


def _is_transposed(node: fx.Node) -> bool:
    """Whether a matrix is another one's transpose."""
    if node.target is aten.t.default:
        return True
    if node.target is aten.transpose.int:
        return sorted(d % 2 for d in node.args[1:]) == [0, 1]  # type: ignore[operator]
    return node.target is aten.permute.default and [d % 2 for d in node.args[1]] == [1, 0]  # type: ignore[union-attr,operator]
