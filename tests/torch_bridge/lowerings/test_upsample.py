from __future__ import annotations

import jax.numpy as jnp
import pytest
import torch

from tests.torch_bridge.lowerings.batches import together
from tests.torch_bridge.lowerings.nn_checks import check_gradients
from tests.torch_bridge.lowerings.parity import check
from torch_bridge.lowerings import lookup

aten = torch.ops.aten
torch.manual_seed(0)
SIZES = [(7, [7]), (7, [14]), (7, [21]), (7, [3]), (7, [1]), (7, [10]), (1, [5]), (8, [4])]
NEAREST = {1: "upsample_nearest1d", 2: "upsample_nearest2d", 3: "upsample_nearest3d"}


@pytest.mark.thorough(keep=9)
@pytest.mark.parametrize("exact", ["", "_exact"])
@pytest.mark.parametrize(("size", "out"), SIZES)
@together
def test_nearest(size, out, exact):
    name = "_upsample_nearest_exact1d" if exact else "upsample_nearest1d"
    forward, backward = getattr(aten, name).default, getattr(aten, f"{name}_backward").default
    x = torch.randn(2, 3, size)
    for y in (x, x.bfloat16(), x.double()):
        check(forward, y, out, jit=False)
    check(backward, torch.randn(2, 3, *out), out, [2, 3, size])


@pytest.mark.parametrize("exact", ["", "_exact"])
@together
def test_nearest_2d_3d(exact):
    x = torch.randn(2, 3, 4, 5, 6)
    for n, sizes in ((2, [7, 12]), (3, [8, 3, 9])):
        name = f"_upsample_nearest_exact{n}d" if exact else f"upsample_nearest{n}d"
        y = x[0] if n == 2 else x
        check(getattr(aten, name).default, y, sizes)
        check(getattr(aten, f"{name}_backward").default, torch.randn(*y.shape[:2], *sizes), sizes, list(y.shape))
        check_gradients(getattr(aten, name).default, y, sizes)


@together
def test_nearest_with_scales():
    x = torch.randn(1, 2, 5, 7)
    check(aten.upsample_nearest2d.default, x, [8, 9], 1.7, 1.3)
    check(aten._upsample_nearest_exact2d.default, x, [8, 9], 1.7, 1.3)
    check(aten.upsample_nearest2d.default, (x * 50).to(torch.uint8), [10, 14], 2.0, 2.0)
    check(aten.upsample_nearest2d_backward.default, torch.randn(1, 2, 8, 9), [8, 9], [1, 2, 5, 7], 1.7, 1.3)


@pytest.mark.thorough(keep=9)
@pytest.mark.parametrize("align", [False, True])
@pytest.mark.parametrize(("size", "out"), SIZES)
@together
def test_linear(size, out, align):
    x = torch.randn(2, 3, size)
    check(aten.upsample_linear1d.default, x, out, align)
    check(aten.upsample_linear1d_backward.default, torch.randn(2, 3, *out), out, [2, 3, size], align)
    check(aten.upsample_bicubic2d.default, x[None], [3, *out], align)
    check(aten.upsample_bicubic2d_backward.default, torch.randn(1, 2, 3, *out), [3, *out], [1, 2, 3, size], align, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("align", [False, True])
@together
def test_more_linear(align):
    x = torch.randn(2, 3, 4, 5, 6)
    check(aten.upsample_bilinear2d.default, x[0], [9, 4], align)
    check(aten.upsample_bilinear2d.default, x[0], [7, 9], align, 1.8, 1.6)
    check(aten.upsample_bilinear2d.default, x[0].bfloat16(), [9, 4], align)
    check(aten.upsample_bilinear2d.default, x[0].double(), [9, 4], align)
    check(aten.upsample_bilinear2d_backward.default, torch.randn(3, 4, 7, 9), [7, 9], [3, 4, 5, 6], align, 1.8, 1.6)
    check(aten.upsample_trilinear3d.default, x, [8, 3, 7], align)
    check(aten.upsample_trilinear3d_backward.default, torch.randn(2, 3, 8, 3, 7), [8, 3, 7], list(x.shape), align)
    check_gradients(aten.upsample_bilinear2d.default, x[0], [9, 4], align)
    check_gradients(aten.upsample_bicubic2d.default, x[0], [9, 4], align)


@pytest.mark.thorough(keep=9)
@pytest.mark.parametrize("op", [aten._upsample_bilinear2d_aa, aten._upsample_bicubic2d_aa])
@pytest.mark.parametrize("out", [[3, 4], [13, 17], [5, 20], [9, 8]])
@pytest.mark.parametrize("align", [False, True])
@together
def test_antialiased(op, out, align):
    close = {"rtol": 1e-4, "atol": 1e-5}
    check(op.default, torch.randn(2, 3, 9, 8), out, align, **close)
    backward = getattr(aten, f"{op.__name__}_backward").default
    check(backward, torch.randn(2, 3, *out), out, [2, 3, 9, 8], align, **close)


def test_integers_are_refused():
    with pytest.raises(NotImplementedError, match=r"upsample_bilinear2d.*convert to float32"):
        lookup(aten.upsample_bilinear2d.default).fn(jnp.ones((1, 1, 2, 2), jnp.uint8), [4, 4], False)
