from __future__ import annotations

import pytest
import torch

from tests.torch_bridge.lowerings.autograd_parity import check_grad
from tests.torch_bridge.lowerings.batches import together
from tests.torch_bridge.lowerings.parity import check

aten = torch.ops.aten
torch.manual_seed(0)
X = torch.randn(2, 3, 4)
I = torch.arange(12).reshape(3, 4)
S = torch.tensor(2.0)
IMAGE = torch.randn(2, 8, 3, 5)

CASES = [
    (aten.cat.default, ([X, X], 1)),
    (aten.cat.default, ([X[0], I], -1)),
    (aten.cat.default, ([X[0].bfloat16(), X[0].half()], 0)),
    (aten.cat.default, ([I > 3, I.to(torch.uint8)], 0)),
    (aten.cat.default, ([torch.zeros(0), X], 2)),
    (aten.cat.default, ([torch.zeros(0, dtype=torch.float64), X], 2)),
    (aten.cat.default, ([torch.zeros(0), torch.zeros(0, dtype=torch.int64)],)),
    (aten.cat.default, ([torch.zeros(0, 4), X[0]], 0)),
    (aten.stack.default, ([X, X], -1)),
    (aten.stack.default, ([X[0], I], 1)),
    (aten.stack.default, ([S, torch.tensor(1)],)),
    (aten._stack.default, ([X, X],)),
    (aten.block_diag.default, ([X[0], S, I[0], torch.zeros(2, 0)],)),
    (aten.repeat.default, (X, [2, 1, 1, 3])),
    (aten.repeat.default, (X, [1, 0, 1])),
    (aten.repeat.default, (S, [2])),
    (aten.repeat.default, (S, [])),
    (aten.flip.default, (X, [0, -1])),
    (aten.flip.default, (X, [])),
    (aten.flip.default, (S, [0])),
    (aten.roll.default, (X, [1], [])),
    (aten.roll.default, (X, [-5, 9], [1, -1])),
    (aten.roll.default, (X, [2, 2], [1, 1])),
    (aten.roll.default, (S, [2], [])),
    (aten.roll.default, (torch.zeros(0, 2), [1], [0])),
    (aten.rot90.default, (X, 3, [1, 2])),
    (aten.rot90.default, (X, -1, [-1, 0])),
    (aten.rot90.default, (X, 2)),
    (aten.tril.default, (X,)),
    (aten.tril.default, (X, -2)),
    (aten.tril.default, (I > 2, 1)),
    (aten.tril.default, (torch.full((3, 3), torch.nan),)),
    (aten.tril.default, (torch.zeros(0, 3),)),
    (aten.triu.default, (X, 1)),
    (aten.triu.default, (I, -9)),
    (aten.pixel_shuffle.default, (IMAGE, 2)),
    (aten.pixel_shuffle.default, (IMAGE[0], 2)),
    (aten.pixel_unshuffle.default, (torch.randn(2, 3, 4, 6), 2)),
    (aten.pixel_unshuffle.default, (torch.randn(1, 4, 6), 2)),
    (aten.channel_shuffle.default, (IMAGE, 4)),
    (aten.channel_shuffle.default, (IMAGE[:, :, 0], 2)),
]


@pytest.mark.parametrize(("op", "args"), CASES)
@together
def test_values(op, args):
    check(op, *args)


GRADS = [
    (aten.cat.default, ([X[0], X[1].double()], 0)),
    (aten.roll.default, (X, [-5, 9], [1, -1])),
    (aten.tril.default, (X, 1)),
    (aten.repeat.default, (X, [2, 1, 1, 3])),
    (aten.pixel_shuffle.default, (IMAGE, 2)),
]


@pytest.mark.parametrize(("op", "args"), GRADS)
@together
def test_gradients(op, args):
    check_grad(op, *args)
