"""Products with transposed weights contract the last dims, with the same results."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from torch_bridge.aot import products

aten = torch.ops.aten


@pytest.mark.parametrize(
    ("op", "args", "found"),
    [
        (aten.t.default, (), aten.linear.default),
        (aten.transpose.int, (-1, 0), aten.linear.default),
        (aten.permute.default, ([1, 0],), aten.linear.default),
        (aten.permute.default, ([0, 1],), aten.mm.default),
        (aten.transpose.int, (1, -1), aten.mm.default),
    ],
)
def test_contract(op: object, args: tuple[object, ...], found: object) -> None:
    graph = fx.Graph()
    x, w = graph.placeholder("x"), graph.placeholder("w")
    made = graph.call_function(op, (w, *args))  # type: ignore[arg-type]
    product = graph.call_function(aten.mm.default, (x, made))
    graph.output(product)
    module, given = fx.GraphModule(torch.nn.Module(), graph), (torch.randn(2, 3), torch.randn(3, 3))
    expected = module(*given)
    products.contract(module.graph)
    module.recompile()
    assert product.target is found
    torch.testing.assert_close(module(*given), expected)
