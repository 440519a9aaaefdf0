"""Products of matrices one of which is a transpose: in an annotated program they read it as it lies.

`x @ w.t()` in a forward pass and `grad @ w` in the backward pass read one weight. As two values, the transpose and the weight, XLA would gather them both.

`grad.t() @ x` gives the weight's gradient. Nothing is gathered for it. On CPUs XLA computes a product whose first operand is read down its columns in Eigen,
and one whose operands lie in order in YNNPACK. For the 128 rows or so that a device has, transposing first takes 0.6 to 0.9 of the time, all in all.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Any

import jax
import torch
from torch import fx

aten = torch.ops.aten

_OPERANDS = {aten.mm.default: (0, 1), aten.addmm.default: (1, 2)}
"""By op, the places of the matrices among its arguments. All arguments up to there are tensors."""


_OF_INPUTS = frozenset({aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten._to_copy.default})
"""What an input goes through and is still gathered like one."""


def find(graph: fx.Graph, but: Set[fx.Node] = frozenset()) -> dict[fx.Node, tuple[int, ...]]:
    """By product, the places of those operands that are transposes, but for these."""
    found: dict[fx.Node, tuple[int, ...]] = {}
    for node in graph.nodes:
        places = tuple(at for at in _OPERANDS.get(node.target, ()) if swaps(node.args[at]) and node.args[at] not in but)
        if places:
            found[node] = places
    return found


def to_transpose_first(graph: fx.Graph) -> frozenset[fx.Node]:
    """Transposes of computed values that are nothing but first operands of products: on CPUs they are made before the products."""
    if jax.default_backend() != "cpu":
        return frozenset()
    return frozenset(n for n in graph.nodes if swaps(n) and not _is_of_input(n.args[0]) and all(_begins_with(user, n) for user in n.users))


def _begins_with(product: fx.Node, operand: fx.Node) -> bool:
    return product.target is aten.mm.default and product.args[0] is operand and product.args[1] is not operand


def _is_of_input(node: Any) -> bool:
    while node.op == "call_function" and node.target in _OF_INPUTS:
        node = node.args[0]
    return bool(node.op == "placeholder")


def swaps(node: object) -> bool:
    """Whether a node transposes a matrix."""
    if not isinstance(node, fx.Node):
        return False
    if node.target is aten.t.default:
        return True
    if node.target is aten.transpose.int:
        return sorted(d % 2 for d in node.args[1:]) == [0, 1]  # type: ignore[operator]
    return node.target is aten.permute.default and [d % 2 for d in node.args[1]] == [1, 0]  # type: ignore[union-attr,operator]
