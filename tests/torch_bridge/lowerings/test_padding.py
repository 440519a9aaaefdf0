from __future__ import annotations

import pytest
import torch

from tests.torch_bridge.lowerings.autograd_parity import check_grad
from tests.torch_bridge.lowerings.batches import together
from tests.torch_bridge.lowerings.parity import check
from torch_bridge import _compat
from torch_bridge.ir.dtypes import Scalar

aten = torch.ops.aten
torch.manual_seed(0)
X = torch.randn(2, 3, 4, 5, 6)

CONSTANT = [
    (X, [1, 2]),
    (X, [0, 0, 1, 0, 2, 1], 3.5),
    (X, [-1, 2, 3, -2], 1),
    (X.int(), [1, 1], 2.9),
    (X > 0, [1, 1], 2),
    (X.bfloat16(), [1, 1], float("-inf")),
    (torch.zeros(0, 2), [1, 1, 1, 1], 7.0),
    (X, []),
]


@pytest.mark.parametrize("args", CONSTANT)
@together
def test_constant(args):
    check(aten.constant_pad_nd.default, *args)


def test_constant_with_a_lifted_value():
    with _compat.enable_x64():
        import jax.numpy as jnp

        import torch_bridge.lowerings as lowerings

        out = lowerings.lookup(aten.constant_pad_nd.default).fn(jnp.ones(2, jnp.int32), [1, 0], Scalar(float, jnp.asarray(2.9)))
    assert out.tolist() == [2, 1, 1] and out.dtype == jnp.int32


PADS = [
    (1, [3, 2]),
    (1, [0, 4]),
    (1, [-1, 3]),
    (1, [3, -2]),
    (2, [1, 2, 3, 4]),
    (2, [0, 0, 2, 1]),
    (2, [2, -1, -1, 0]),
    (3, [1, 2, 3, 4, 1, 0]),
]


@pytest.mark.parametrize("kind", ["reflection", "replication"])
@pytest.mark.parametrize(("dims", "padding"), PADS)
@together
def test_borders(kind, dims, padding):
    op = getattr(aten, f"{kind}_pad{dims}d")
    batched = X[0, 0] if dims == 1 else X[0] if dims == 2 else X
    for x in (batched, batched[0], batched.double()):
        check(op.default, x, padding)
    if min(padding) >= 0:
        check_grad(op.default, batched, padding)
        backward = getattr(aten, f"{kind}_pad{dims}d_backward").default
        grad = torch.randn_like(op(batched, padding))
        check(backward, grad, batched, padding)


@together
def test_replication_can_exceed_the_size():
    check(aten.replication_pad1d.default, X[0, 0], [9, 11])
