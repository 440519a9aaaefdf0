"""Products of matrices one of which is a transpose: in an annotated program they read it as it lies.

`x @ w.t()` in a forward pass and `grad @ w` in the backward pass read one weight. As two values, the transpose and the weight, XLA would gather them both.
"""

from __future__ import annotations

import torch
from torch import fx

aten = torch.ops.aten

_OPERANDS = {aten.mm.default: (0, 1), aten.addmm.default: (1, 2)}
"""By op, the places of the matrices among its arguments. All arguments up to there are tensors."""


def find(graph: fx.Graph) -> dict[fx.Node, tuple[int, ...]]:
    """By product, the places of those operands that are transposes."""
    found: dict[fx.Node, tuple[int, ...]] = {}
    for node in graph.nodes:
        places = tuple(at for at in _OPERANDS.get(node.target, ()) if swaps(node.args[at]))
        if places:
            found[node] = places
    return found


def swaps(node: object) -> bool:
    """Whether a node transposes a matrix."""
    if not isinstance(node, fx.Node):
        return False
    if node.target is aten.t.default:
        return True
    if node.target is aten.transpose.int:
        return sorted(d % 2 for d in node.args[1:]) == [0, 1]  # type: ignore[operator]
    return node.target is aten.permute.default and [d % 2 for d in node.args[1]] == [1, 0]  # type: ignore[union-attr,operator]
