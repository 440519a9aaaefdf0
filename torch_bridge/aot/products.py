"""Products with transposed weights, as `x @ w.t()` records them, as one op that contracts the last dims.

XLA for CPUs makes a loop of a row times a transposed matrix, and in it computes what the row is made of, such as a GELU, once for each output.
"""

from __future__ import annotations

import torch
from torch import fx

from torch_bridge.compiler.transposed_products import swaps

aten = torch.ops.aten


def contract(graph: fx.Graph) -> None:
    """Put `aten.linear` in the place of `aten.mm` by a transposed matrix."""
    for node in graph.nodes:
        if node.target is aten.mm.default and swaps(node.args[1]):
            node.target = aten.linear.default
            node.args = (node.args[0], node.args[1].args[0])
