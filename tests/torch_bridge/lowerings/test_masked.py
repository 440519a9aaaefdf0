from __future__ import annotations

import pytest
import torch

import torch_bridge.lowerings as lowerings
from tests.torch_bridge.lowerings.autograd_parity import check_grad
from tests.torch_bridge.lowerings.batches import together
from tests.torch_bridge.lowerings.parity import check, to_jax, to_torch
from torch_bridge import _compat
from torch_bridge.ir.dtypes import Scalar

aten = torch.ops.aten
torch.manual_seed(0)
X = torch.randn(3, 4)
M = torch.tensor([True, False, True, False])
I = torch.arange(12).reshape(3, 4)

CASES = [
    (aten.masked_fill.Scalar, (X, M, float("-inf"))),
    (aten.masked_fill.Scalar, (X, X > 0, 2)),
    (aten.masked_fill.Scalar, (X[0], X > 0, 2)),
    (aten.masked_fill.Scalar, (I, M, 2.9)),
    (aten.masked_fill.Scalar, (X > 0, M, True)),
    (aten.masked_fill.Scalar, (X.bfloat16(), M, 1e-3)),
    (aten.masked_fill.Scalar, (torch.tensor(1.0), torch.tensor(True), 2)),
    (aten.masked_fill.Tensor, (X, M, torch.tensor(2.0))),
    (aten.masked_fill.Tensor, (X, M, torch.tensor(2, dtype=torch.int64))),
    (aten.masked_fill.Tensor, (X.bfloat16(), M, torch.tensor(2.123))),
    (aten.masked_scatter.default, (X, X > 0, torch.randn(20))),
    (aten.masked_scatter.default, (X, M, torch.randn(2, 3))),
    (aten.masked_scatter.default, (X, torch.tensor([[False], [True], [False]]), torch.randn(4))),
    (aten.masked_scatter.default, (X, X > 99, torch.randn(0))),
    (aten.masked_scatter.default, (I, I % 3 == 1, I + 100)),
    (aten.masked_scatter_backward.default, (X, X > 0, [20])),
    (aten.masked_scatter_backward.default, (X, X > 0, [4, 3])),
    (aten.masked_scatter_backward.default, (X, X > 99, [2])),
]


@pytest.mark.parametrize(("op", "args"), CASES)
@together
def test_values(op, args):
    check(op, *args)


def test_lifted_number():
    import jax
    import jax.numpy as jnp

    with _compat.enable_x64():
        fn = lowerings.lookup(aten.masked_fill.Scalar).fn
        got = jax.jit(lambda x, m, v: fn(x, m, Scalar(float, v)))(to_jax(X), to_jax(M), jnp.asarray(-1e9))
    torch.testing.assert_close(to_torch(got), X.masked_fill(M, -1e9))


GRADS = [
    (aten.masked_fill.Scalar, (X, M, float("-inf"))),
    (aten.masked_fill.Tensor, (X, M, torch.tensor(2.0))),
    (aten.masked_scatter.default, (X, X > 0, torch.randn(20))),
]


@pytest.mark.parametrize(("op", "args"), GRADS)
@together
def test_gradients(op, args):
    check_grad(op, *args)


ROWS = torch.tensor([0, 5, -2, 1])  # out of range where the mask is False
AT = torch.tensor([True, False, True, True])


@pytest.mark.parametrize("x", [X, I])
@together
def test_masked_indexing_reads_nothing_where_the_mask_is_false(x: torch.Tensor) -> None:
    rows = ROWS.clamp(-3, 2)
    check(aten._unsafe_masked_index.default, x, AT[:, None], [rows], 7)
    check(aten._unsafe_masked_index.default, x, AT, [None, ROWS.clamp(-4, 3)], 7)
    check(aten._unsafe_masked_index.default, x, AT, [rows, torch.tensor(1)], 0)


@pytest.mark.parametrize("x", [X, I])
@together
def test_masked_indexing_adds_only_where_the_mask_is_true(x: torch.Tensor) -> None:
    values = torch.arange(16).reshape(4, 4).to(x.dtype)
    check(aten._unsafe_masked_index_put_accumulate.default, x, AT[:, None], [ROWS.clamp(-3, 2)], values)


def test_masked_indexing_takes_any_index_where_the_mask_is_false() -> None:
    low = lowerings.lookup(aten._unsafe_masked_index.default)
    assert low is not None
    with _compat.enable_x64():
        got = to_torch(low.fn(to_jax(X), to_jax(AT[:, None]), [to_jax(ROWS * 100)], 7))
    torch.testing.assert_close(got[0], X[0])
    torch.testing.assert_close(got[1], torch.full((4,), 7.0))
