from __future__ import annotations

import pytest
import torch

from tests.torch_bridge.lowerings.autograd_parity import check_grad
from tests.torch_bridge.lowerings.batches import together
from tests.torch_bridge.lowerings.parity import check

aten = torch.ops.aten
torch.manual_seed(0)
W = torch.randn(7, 4)
I = torch.randint(0, 7, (3, 5))
G = torch.randn(3, 5, 4)
NONE = torch.zeros(0, dtype=torch.int64)


@pytest.mark.parametrize(
    "args", [(W, I), (W, I, 2), (W, I.int(), 2, True), (W, torch.tensor(3)), (W, NONE), (torch.zeros(0, 4), NONE), (W.bfloat16(), I)]
)
@together
def test_forward(args):
    check(aten.embedding.default, *args)


@pytest.mark.parametrize("padding_idx", [-1, 2])
@pytest.mark.parametrize("by_freq", [False, True])
@together
def test_backward(padding_idx, by_freq):
    check(aten.embedding_dense_backward.default, G, I, 7, padding_idx, by_freq)
    check(aten.embedding_dense_backward.default, G.double(), I.int(), 9, padding_idx, by_freq)
    check(aten.embedding_dense_backward.default, G[0, 0], torch.tensor(1), 7, padding_idx, by_freq)
    check(aten.embedding_dense_backward.default, torch.zeros(0, 4), NONE, 7, padding_idx, by_freq)
    check(aten.embedding_dense_backward.default, G.bfloat16(), I, 7, padding_idx, by_freq, atol=5e-2, rtol=2e-2)  # torch adds in bfloat16
    check_grad(aten.embedding.default, W, I, padding_idx, by_freq)


@pytest.mark.parametrize("norm", [1.0, 2.0, float("inf")])
@together
def test_renorm(norm):
    check(aten.embedding_renorm.default, W, I[0], 1.0, norm)
