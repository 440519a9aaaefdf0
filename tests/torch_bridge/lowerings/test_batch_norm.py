from __future__ import annotations

import pytest
import torch

from tests.torch_bridge.lowerings.batches import together
from tests.torch_bridge.lowerings.nn_checks import check_gradients, run
from tests.torch_bridge.lowerings.parity import check
from torch_bridge.lowerings import lookup

aten = torch.ops.aten
torch.manual_seed(0)
SHAPES = [(4, 3), (4, 3, 5), (2, 3, 4, 5), (2, 3, 2, 3, 2)]
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


def parts(shape):
    c = shape[1]
    return torch.randn(shape) + 3, torch.randn(c), torch.randn(c), torch.randn(c), torch.rand(c) + 0.5


@pytest.mark.parametrize("shape", SHAPES)
@together
def test_training(shape):
    x, w, b, mean, var = parts(shape)
    check(aten._native_batch_norm_legit_functional.default, x, w, b, mean, var, True, 0.3, 1e-5, **CLOSE)
    check(aten._batch_norm_with_update_functional.default, x, w, b, mean, var, 0.3, 1e-5, **CLOSE)
    check(aten.native_batch_norm.default, x, None, None, None, None, True, 0.1, 1e-3, **CLOSE)
    check(aten._native_batch_norm_legit.no_stats, x, w, b, True, 0.1, 1e-3, **CLOSE)
    check_gradients(aten._native_batch_norm_legit.no_stats, x, w, b, True, 0.1, 1e-3, **CLOSE)


@pytest.mark.parametrize("shape", SHAPES)
def test_evaluation(shape):
    """The saved statistics, which nobody reads, are empty on CPU and per channel in torch's meta kernel, which we follow."""
    x, w, b, mean, var = parts(shape)
    expected = aten.native_batch_norm(x, w, b, mean, var, False, 0.1, 1e-5)[0]
    for op in (aten.native_batch_norm.default, aten._native_batch_norm_legit.default, aten._native_batch_norm_legit_functional.default):
        out = run(op, x, w, b, mean, var, False, 0.1, 1e-5)
        torch.testing.assert_close(out[0], expected, **CLOSE)
        torch.testing.assert_close(out[1:3], [mean, torch.rsqrt(var + 1e-5)])
    torch.testing.assert_close(out[3:], [mean, var])
    torch.testing.assert_close(run(aten._native_batch_norm_legit_no_training.default, x, w, b, mean, var, 0.1, 1e-5)[0], expected, **CLOSE)
    torch.testing.assert_close(run(aten._batch_norm_no_update.default, x, w, b, mean, var, 0.1, 1e-5)[0], expected, **CLOSE)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("train", [True, False])
def test_backward(shape, train):
    x, w, b, mean, var = parts(shape)
    _, m, s = aten.native_batch_norm(x, w, b, mean.clone(), var.clone(), train, 0.1, 1e-5)
    g = torch.randn_like(x)
    check(aten.native_batch_norm_backward.default, g, x, w, mean, var, m, s, train, 1e-5, [True] * 3, **CLOSE)
    check(aten.native_batch_norm_backward.default, g, x, None, mean, var, m, s, train, 1e-5, [True, False, False], **CLOSE)
    (got, *_) = run(aten.batch_norm_backward.default, g, x, w, mean, var, m, s, train, 1e-5, [True] * 3, torch.zeros(0))
    torch.testing.assert_close(got, aten.native_batch_norm_backward(g, x, w, mean, var, m, s, train, 1e-5, [True] * 3)[0], **CLOSE)


def test_bfloat16_keeps_float32_statistics():
    x, w, b, mean, var = parts((4, 3, 5))
    low = x.bfloat16()
    check(aten._native_batch_norm_legit_functional.default, low, w, b, mean, var, True, 0.1, 1e-5)
    out = run(aten._native_batch_norm_legit_functional.default, *(t.bfloat16() for t in (x, w, b, mean, var)), True, 0.1, 1e-5)
    assert [t.dtype for t in out] == [torch.bfloat16, torch.float32, torch.float32, torch.bfloat16, torch.bfloat16]


@pytest.mark.parametrize("op", [aten.native_batch_norm.default, aten._native_batch_norm_legit.default])
def test_updates_in_place_are_refused(op):
    x, w, b, mean, var = (t.numpy() for t in parts((4, 3)))
    with pytest.raises(NotImplementedError, match="_native_batch_norm_legit_functional"):
        lookup(op).fn(x, w, b, mean, var, True, 0.1, 1e-5)
    with pytest.raises(NotImplementedError, match="batch_norm_update_stats in training updates"):
        lookup(aten.batch_norm_update_stats.default).fn(x, mean, var, 0.1)


def test_synchronized_pieces_make_batch_norm():
    """Two ranks' halves through the pieces of SyncBatchNorm give the batch norm of the whole, forward and backward."""
    x, w, b, _, _ = parts((5, 3, 4))
    x.requires_grad_()
    w.requires_grad_()
    g = torch.randn_like(x)
    whole = torch.nn.functional.batch_norm(x, None, None, w, b, True, 0.1, 1e-5)
    grad_x, grad_w = torch.autograd.grad(whole, (x, w), g)
    halves, grads = x.detach().split([2, 3]), g.split([2, 3])
    stats = [run(aten.batch_norm_stats.default, h, 1e-5) for h in halves]
    counts = torch.tensor([8.0, 12.0])
    mean, invstd = run(
        aten.batch_norm_gather_stats_with_counts.default,
        x,
        torch.stack([s[0] for s in stats]),
        torch.stack([s[1] for s in stats]),
        None,
        None,
        0.1,
        1e-5,
        counts,
    )
    out = [run(aten.batch_norm_elemt.default, h, w, b, mean, invstd, 1e-5)[0] for h in halves]
    torch.testing.assert_close(torch.cat(out), whole.detach(), **CLOSE)
    sums = [
        run(aten.batch_norm_backward_reduce.default, d, h, mean, invstd, w, True, True, True) for d, h in zip(grads, halves, strict=True)
    ]
    dy, dy_xmu, gw, _ = (sum(s[i] for s in sums) for i in range(4))
    args = [(d, h, mean, invstd, w, dy, dy_xmu, counts.int()) for d, h in zip(grads, halves, strict=True)]
    torch.testing.assert_close(torch.cat([run(aten.batch_norm_backward_elemt.default, *a)[0] for a in args]), grad_x, **CLOSE)
    torch.testing.assert_close(gw, grad_w, **CLOSE)
