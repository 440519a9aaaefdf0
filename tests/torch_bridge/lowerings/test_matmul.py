from __future__ import annotations

import pytest
import torch

from tests.torch_bridge.lowerings.batches import together
from tests.torch_bridge.lowerings.nn_checks import check_gradients, check_scalars, run
from tests.torch_bridge.lowerings.parity import check

aten = torch.ops.aten
torch.manual_seed(0)
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.half, torch.int64, torch.complex64]


def rand(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(*shape, dtype=torch.complex64 if dtype.is_complex else torch.float32).to(dtype)
    return torch.randint(-5, 5, shape, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@together
def test_products(dtype):
    check(aten.mm.default, rand(4, 5, dtype=dtype), rand(5, 3, dtype=dtype))
    check(aten.bmm.default, rand(2, 4, 5, dtype=dtype), rand(2, 5, 3, dtype=dtype))
    check(aten.mv.default, rand(4, 5, dtype=dtype), rand(5, dtype=dtype))
    check(aten.dot.default, rand(5, dtype=dtype), rand(5, dtype=dtype))
    check(aten.vdot.default, rand(5, dtype=dtype), rand(5, dtype=dtype))


@pytest.mark.thorough(keep=8)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scales", [{}, {"beta": 2, "alpha": 3}, {"beta": 0}])
def test_sums_of_products(dtype, scales):
    check(aten.addmm.default, rand(3, dtype=dtype), rand(4, 5, dtype=dtype), rand(5, 3, dtype=dtype), **scales)
    check(aten.addmv.default, rand(4, dtype=dtype), rand(4, 5, dtype=dtype), rand(5, dtype=dtype), **scales)
    check(aten.baddbmm.default, rand(2, 4, 3, dtype=dtype), rand(2, 4, 5, dtype=dtype), rand(2, 5, 3, dtype=dtype), **scales)
    low = {"rtol": 5e-2, "atol": 5e-2} if dtype in (torch.bfloat16, torch.half) else {}  # torch rounds in between
    check(aten.addr.default, rand(4, 3, dtype=dtype), rand(4, dtype=dtype), rand(3, dtype=dtype), **low, **scales)
    check(aten.addbmm.default, rand(4, 3, dtype=dtype), rand(2, 4, 5, dtype=dtype), rand(2, 5, 3, dtype=dtype), **low, **scales)


@together
def test_beta_zero_ignores_nan():
    nan = torch.full((4, 3), float("nan"))
    check(aten.addmm.default, nan, rand(4, 5), rand(5, 3), beta=0)
    check(aten.addr.default, nan, rand(4), rand(3), beta=0)
    check_scalars(aten.addmm.default, nan, rand(4, 5), rand(5, 3), beta=0, alpha=1.5)


@together
def test_traced_scales():
    for dtype, beta, alpha in [(torch.float32, 0.5, 2), (torch.bfloat16, 0.5, 2.0), (torch.int64, 2, 3)]:
        check_scalars(aten.addmm.default, rand(3, dtype=dtype), rand(4, 5, dtype=dtype), rand(5, 3, dtype=dtype), beta=beta, alpha=alpha)
        check_scalars(aten.addr.default, rand(4, 3, dtype=dtype), rand(4, dtype=dtype), rand(3, dtype=dtype), beta=beta, alpha=alpha)


@together
def test_empty():
    check(aten.mm.default, rand(4, 0), rand(0, 3))
    check(aten.mm.default, rand(0, 4), rand(4, 3))
    check(aten.bmm.default, rand(0, 4, 2), rand(0, 2, 3))
    check(aten.dot.default, rand(0), rand(0))
    check(aten.addmm.default, rand(4, 3), rand(4, 0), rand(0, 3))


@together
def test_addr_promotes():
    check(aten.addr.default, rand(4, 3, dtype=torch.int64), rand(4), rand(3, dtype=torch.float64))
    check(aten.addr.default, rand(4, 3) > 0, rand(4) > 0, rand(3) > 0)


def test_half_precision_rounds_once():
    a, b = rand(16, 512, dtype=torch.bfloat16), rand(512, 16, dtype=torch.bfloat16)
    (got,) = run(aten.mm.default, a, b)
    wide = a.double() @ b.double()
    assert (got.double() - wide).abs().max() <= wide.abs().max() * 2**-8


def test_wider_results():
    a, b, c = rand(4, 5, dtype=torch.bfloat16), rand(5, 3, dtype=torch.bfloat16), rand(4, 3)
    torch.testing.assert_close(run(aten.mm.dtype, a, b, torch.float32)[0], a.float() @ b.float())
    torch.testing.assert_close(run(aten.addmm.dtype, c, a, b, torch.float32)[0], c + a.float() @ b.float())
    torch.testing.assert_close(run(aten.bmm.dtype, a[None], b[None], torch.float32)[0], (a.float() @ b.float())[None])
    torch.testing.assert_close(run(aten.baddbmm.dtype, c[None], a[None], b[None], torch.float32)[0], (c + a.float() @ b.float())[None])


@together
def test_int_mm():
    a, b = (torch.randint(-128, 128, shape, dtype=torch.int8) for shape in ((32, 64), (64, 16)))
    check(aten._int_mm.default, a, b)


@together
def test_addmm_activation():
    args = rand(3), rand(4, 5), rand(5, 3)
    check(aten._addmm_activation.default, *args)
    check(aten._addmm_activation.default, *args, use_gelu=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear(dtype):
    x, w, b = rand(2, 3, 5, dtype=dtype), rand(4, 5, dtype=dtype), rand(4, dtype=dtype)
    check(aten.linear.default, x, w, b)
    check(aten.linear.default, x[0, 0], w)
    check(aten.linear.default, x, w[0])
    x, w, b = (t.float().requires_grad_() for t in (x, w, b))
    g = rand(2, 3, 4)
    expected = torch.autograd.grad(aten.linear(x, w, b), (x, w, b), g)
    for got, want in zip(run(aten.linear_backward.default, x, g, w, [True] * 3), expected, strict=True):
        torch.testing.assert_close(got, want)


def test_matmul_backward():
    for a, b in [(rand(2, 3, 4), rand(4, 5)), (rand(4), rand(4)), (rand(3, 1, 2, 4), rand(5, 4, 2))]:
        a, b = a.requires_grad_(), b.requires_grad_()
        out = a @ b
        g = torch.randn_like(out)
        expected = torch.autograd.grad(out, (a, b), g)
        for got, want in zip(run(aten.matmul_backward.default, g, a, b, [True, True]), expected, strict=True):
            torch.testing.assert_close(got, want)
    assert run(aten.matmul_backward.default, g, a, b, [True, False])[1] is None


@together
def test_gradients():
    check_gradients(aten.mm.default, rand(4, 5), rand(5, 3))
    check_gradients(aten.bmm.default, rand(2, 4, 5), rand(2, 5, 3))
    check_gradients(aten.addmm.default, rand(3), rand(4, 5), rand(5, 3), beta=2, alpha=0.5)
    check_gradients(aten.addbmm.default, rand(4, 3), rand(2, 4, 5), rand(2, 5, 3))
    check_gradients(aten.linear.default, rand(2, 5), rand(4, 5), rand(4))
    check_gradients(aten.mm.default, rand(4, 5, dtype=torch.bfloat16), rand(5, 3, dtype=torch.bfloat16))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.half])
@pytest.mark.parametrize("shapes", [((1, 14, 12), (1, 3, 14)), ((1, 2, 14, 12), (1, 2, 3, 14)), ((2, 1, 14, 12), (2, 1, 3, 14))], ids=str)
def test_products_of_two_transposes_in_batches_of_one(shapes: tuple[tuple[int, ...], ...], dtype: torch.dtype) -> None:
    """Forward and backward, the result read in its own order and in another. XLA refused the first in bfloat16."""
    a, b = (rand(*shape, dtype=dtype) for shape in shapes)

    def both(a: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor]:
        a, b = a.detach().requires_grad_(), b.detach().requires_grad_()
        product = a.mT @ b.mT
        return [product, product.mT.contiguous(), *torch.autograd.grad(product.square().sum(), (a, b))]

    for found, wanted in zip(both(a.to("xla"), b.to("xla")), both(a, b), strict=True):
        torch.testing.assert_close(found.cpu(), wanted, rtol=5e-2, atol=5e-1)
    torch.testing.assert_close(
        torch.einsum("ji,kj->ik", a.flatten(0, -3)[0].to("xla"), b.flatten(0, -3)[0].to("xla")).cpu(),
        torch.einsum("ji,kj->ik", a.flatten(0, -3)[0], b.flatten(0, -3)[0]),
        rtol=5e-2,
        atol=5e-1,
    )
