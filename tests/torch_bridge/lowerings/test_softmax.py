from __future__ import annotations

import pytest
import torch

from tests.torch_bridge.lowerings.batches import together
from tests.torch_bridge.lowerings.nn_checks import check_gradients, run
from tests.torch_bridge.lowerings.parity import check

aten = torch.ops.aten
torch.manual_seed(0)
inf, nan = float("inf"), float("nan")
X = torch.randn(3, 4, 5) * 4
HARD = torch.tensor([[-inf, -inf, -inf], [inf, 0.0, 1.0], [nan, 0.0, 1.0], [-inf, 0.0, 1.0], [1e30, 0.0, -1e30]])
CASES = [
    (X, 0),
    (X, -1),
    (X, 1),
    (X.double(), 2),
    (X.bfloat16(), -1),
    (X.half(), 1),
    (HARD, -1),
    (torch.tensor(2.0), 0),
    (torch.tensor(2.0), -1),
]
CASES += [(torch.empty(0, 3), 1), (torch.empty(2, 0), 1), (torch.empty(2, 0), 0)]
SOFT = [aten._softmax.default, aten._log_softmax.default]
BACK = [aten._softmax_backward_data.default, aten._log_softmax_backward_data.default]


@pytest.mark.core(keep=10)
@pytest.mark.parametrize(("x", "dim"), CASES)
@pytest.mark.parametrize("op", SOFT)
@together
def test_forward(op, x, dim):
    # torch's CPU log_softmax rounds its intermediate results to bfloat16
    check(op, x, dim, False, **({"atol": 0.07, "rtol": 2e-2} if x.dtype == torch.bfloat16 else {}))


def test_half_to_float_and_one_rounding():
    x = X.bfloat16()
    for op in SOFT:
        (wide,), (low,) = run(op, x, -1, True), run(op, x, -1, False)
        torch.testing.assert_close(wide, op(x.float(), -1, False))
        assert low.dtype == torch.bfloat16 and torch.equal(low, wide.bfloat16())


@pytest.mark.parametrize(("x", "dim"), CASES)
@pytest.mark.parametrize("op", BACK)
@together
def test_backward(op, x, dim):
    check(op, torch.rand_like(x), torch.softmax(x, dim), dim, x.dtype)


@pytest.mark.parametrize("op", SOFT)
@together
def test_gradients(op):
    check_gradients(op, X, 1, False)


@pytest.mark.parametrize("x", [X, HARD, X.bfloat16(), X.masked_fill(X < 2, -inf), torch.empty(2, 0)])
@together
def test_safe_softmax(x):
    check(aten._safe_softmax.default, x, -1)
    check(aten._safe_softmax.default, x, 0, torch.float64)


SCORES = torch.randn(2, 3, 4, 4)
MASKS = [
    (torch.rand(4, 4) > 0.5, 0),
    (torch.tensor([[False, True, True, False], [True, True, True, True]]), 1),
    (torch.rand(2, 3, 4, 4) > 0.6, 2),
]


@pytest.mark.parametrize(("mask", "mask_type"), MASKS)
@together
def test_masked_softmax(mask, mask_type):
    check(aten._masked_softmax.default, SCORES, mask, 3, mask_type)
    full = (mask[:, None, None, :] if mask_type == 1 else mask).expand_as(SCORES).contiguous()
    check(aten._masked_softmax.default, SCORES, full, 1, 2)
    y = torch.where(full, 0.0, torch.softmax(SCORES, 3))
    check(aten._masked_softmax_backward.default, torch.rand_like(SCORES), y, full, 3)
