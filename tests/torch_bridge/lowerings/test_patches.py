from __future__ import annotations

import pytest
import torch

from tests.torch_bridge.lowerings.autograd_parity import check_grad
from tests.torch_bridge.lowerings.batches import together
from tests.torch_bridge.lowerings.parity import check

aten = torch.ops.aten
torch.manual_seed(0)
X = torch.randn(2, 3, 8, 9)

CASES = [
    ([3, 2], [1, 1], [0, 0], [1, 1]),
    ([3, 3], [2, 1], [1, 2], [2, 3]),
    ([2, 3], [1, 1], [0, 0], [2, 3]),
    ([3, 4], [1, 1], [1, 0], [3, 4]),
    ([2, 2], [2, 2], [0, 1], [2, 2]),
    ([1, 1], [1, 1], [0, 0], [1, 1]),
]


@pytest.mark.parametrize("args", CASES)
@together
def test_im2col_and_col2im(args):
    check(aten.im2col.default, X, *args)
    check(aten.im2col.default, X[0], *args)
    check_grad(aten.im2col.default, X, *args)
    columns = torch.randn_like(aten.im2col(X, *args))
    check(aten.col2im.default, columns, [8, 9], *args)
    check(aten.col2im.default, columns[0], [8, 9], *args)
    check_grad(aten.col2im.default, columns, [8, 9], *args)
