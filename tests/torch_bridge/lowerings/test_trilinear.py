"""The trilinear product against eager torch, in the three forms that Bilinear and its backward use."""

from __future__ import annotations

import pytest
import torch

from tests.torch_bridge.lowerings.batches import together
from tests.torch_bridge.lowerings.parity import check

aten = torch.ops.aten
CASES = [
    (torch.randn(4, 2), torch.randn(5, 2, 3), torch.randn(4, 3), [1, 3], [0], [1, 2], [2, 3]),
    (torch.randn(4, 5), torch.randn(5, 2, 3), torch.randn(4, 3), [2, 3], [0], [1, 2], [1, 3]),
    (torch.randn(4, 2), torch.randn(5, 2, 3), torch.randn(4, 5), [1, 3], [0], [2, 3], [1, 2]),
    (torch.randn(4, 2), torch.randn(4, 5), torch.randn(4, 3), [1, 3], [2, 3], [1, 2], [0]),
    (
        torch.randn(1, 2, dtype=torch.float64),
        torch.randn(5, 2, 3, dtype=torch.float64),
        torch.randn(4, 3, dtype=torch.float64),
        [1, 3],
        [0],
        [1, 2],
        [2, 3],
    ),
    (torch.randn(1, 2), torch.randn(1, 2, 3), torch.randn(1, 3), [1, 3], [0], [1, 2], [2]),
    (torch.randn(0, 2), torch.randn(5, 2, 3), torch.randn(0, 3), [1, 3], [0], [1, 2], [2, 3]),
]


@pytest.mark.parametrize("case", CASES)
@together
def test_values(case):
    check(aten._trilinear.default, *case)
