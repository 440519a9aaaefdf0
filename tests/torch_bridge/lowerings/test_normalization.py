from __future__ import annotations

import pytest
import torch

from tests.torch_bridge.lowerings.batches import together
from tests.torch_bridge.lowerings.nn_checks import check_gradients, run
from tests.torch_bridge.lowerings.parity import check

aten = torch.ops.aten
torch.manual_seed(0)
X = torch.randn(4, 3, 6) * 3 + 100
W, B = torch.randn(6), torch.randn(6)
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


@pytest.mark.parametrize(
    ("shape", "w", "b"), [([6], W, B), ([6], W, None), ([6], None, None), ([3, 6], torch.randn(3, 6), torch.randn(3, 6))]
)
@together
def test_layer_norm(shape, w, b):
    check(aten.native_layer_norm.default, X, shape, w, b, 1e-5, **CLOSE)
    check_gradients(aten.native_layer_norm.default, X, shape, w, b, 1e-5, **CLOSE)
    out, mean, rstd = aten.native_layer_norm(X, shape, w, b, 1e-5)
    mask = [True, w is not None, b is not None]
    check(aten.native_layer_norm_backward.default, torch.randn_like(out), X, shape, mean, rstd, w, b, mask, **CLOSE)


@together
def test_layer_norm_corners():
    check(aten.native_layer_norm.default, X.double(), [6], W.double(), None, 1e-5)
    check(aten.native_layer_norm.default, torch.randn(0, 6), [6], W, B, 1e-5)
    empty = torch.randn(0, 6)
    stats = torch.randn(0, 1)
    check(aten.native_layer_norm_backward.default, empty, empty, [6], stats, stats, W, B, [True] * 3)
    check(aten.native_layer_norm.default, torch.zeros(2, 6), [6], W, B, 0.1)


@pytest.mark.parametrize("affine", [torch.float32, torch.bfloat16])
def test_layer_norm_in_bfloat16_saves_float32_statistics(affine):
    """As torch's meta and CUDA kernels do; its CPU kernel saves bfloat16 ones."""
    x, w, b = X.bfloat16(), W.to(affine), B.to(affine)
    out, mean, rstd = run(aten.native_layer_norm.default, x, [6], w, b, 1e-5)
    wide = aten.native_layer_norm(x.float(), [6], w.float(), b.float(), 1e-5)
    assert torch.equal(out, wide[0].bfloat16())
    torch.testing.assert_close((mean, rstd), wide[1:])
    g = torch.randn_like(out)
    grads = run(aten.native_layer_norm_backward.default, g, x, [6], mean, rstd, w, b, [True] * 3)
    assert [t.dtype for t in grads] == [torch.bfloat16, affine, affine]
    expected = aten.native_layer_norm_backward(g.float(), x.float(), [6], mean, rstd, w.float(), b.float(), [True] * 3)
    for got, want in zip(grads, expected, strict=True):
        torch.testing.assert_close(got.float(), want, rtol=2e-2, atol=2e-2)


IMAGES = torch.randn(2, 6, 4, 5) + 10


@pytest.mark.parametrize("group", [1, 2, 6])
@pytest.mark.parametrize("affine", [True, False])
@together
def test_group_norm(group, affine):
    w, b = (torch.randn(6), torch.randn(6)) if affine else (None, None)
    args = (2, 6, 20, group)
    check(aten.native_group_norm.default, IMAGES, w, b, *args, 1e-5, **CLOSE)
    check_gradients(aten.native_group_norm.default, IMAGES, w, b, *args, 1e-5, **CLOSE)
    _, mean, rstd = aten.native_group_norm(IMAGES, w, b, *args, 1e-5)
    check(aten.native_group_norm_backward.default, torch.randn_like(IMAGES), IMAGES, mean, rstd, w, *args, [True, affine, affine], **CLOSE)


@together
def test_group_norm_corners():
    check(aten.native_group_norm.default, IMAGES.bfloat16(), None, None, 2, 6, 20, 3, 1e-5)
    check(aten.native_group_norm.default, torch.randn(0, 6, 4), W, B, 0, 6, 4, 3, 1e-5)
    check(aten.native_group_norm.default, torch.randn(2, 6), W, B, 2, 6, 1, 3, 1e-5)


def rms(x, w, eps):
    y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    return y if w is None else y * w


@pytest.mark.parametrize("w", [W, None])
@pytest.mark.parametrize("eps", [None, 1e-3])
def test_rms_norm(w, eps):
    check(aten._fused_rms_norm.default, X, [6], w, eps)
    check(aten.rms_norm.default, X, [6], w, eps)
    check(aten.rms_norm.default, X.bfloat16(), [6], None if w is None else w.bfloat16(), eps)
    check_gradients(aten._fused_rms_norm.default, X, [6], w, eps, **CLOSE)
    leaves = [t.clone().requires_grad_() for t in ((X,) if w is None else (X, w))]
    out = rms(leaves[0], None if w is None else leaves[1], eps or torch.finfo(torch.float32).eps)
    g = torch.randn_like(out)
    expected = torch.autograd.grad(out, leaves, g)
    rstd = aten._fused_rms_norm(X, [6], w, eps)[1]
    got = run(aten._fused_rms_norm_backward.default, g, X, [6], rstd, w, [True, True])
    for a, e in zip(got, expected, strict=False):
        torch.testing.assert_close(a, e, **CLOSE)


@pytest.mark.parametrize("dim", [0, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weight_norm(dim, dtype):
    v = torch.randn(3, 4, 5).to(dtype)
    g = torch.randn([v.shape[d] if d == dim else 1 for d in range(3)]).to(dtype)
    check(aten._weight_norm_interface.default, v, g, dim)
    _, norms = aten._weight_norm_interface(v, g, dim)
    low = {"rtol": 5e-2, "atol": 5e-2} if dtype == torch.bfloat16 else {}
    check(aten._weight_norm_interface_backward.default, torch.randn_like(v), v, g, norms, dim, **low)
