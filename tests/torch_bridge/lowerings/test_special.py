"""Special functions against eager torch: values on grids that hold the edges, dtypes, Scalars, gradients."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import torch_bridge.lowerings as lowerings
from tests.torch_bridge.lowerings.batches import together
from tests.torch_bridge.lowerings.parity import check, to_jax, to_torch
from torch_bridge import _compat
from torch_bridge.ir import dtypes

aten = torch.ops.aten
INF, NAN = float("inf"), float("nan")
WIDE = torch.tensor([*np.linspace(-30, 30, 81), 0.0, -0.0, 1e-5, -1e-10, 85.0, -100.0, 0.5, INF, -INF, NAN])
PROBABILITIES = torch.tensor([0.0, 1e-30, 1e-10, 0.1, 0.3, 0.5, 0.9, 1 - 1e-6, 1.0, -0.1, 1.1, NAN])
POSITIVE = torch.tensor([0.0, 0.1, 0.5, 0.99, 1.0, 1.5, 2.0, 3.0, 8.0, 9.5, 30.0, 1000.0, INF, NAN])
UNARY = {
    "special_entr": WIDE,
    "special_erfcx": WIDE,
    "special_i0e": WIDE,
    "special_i1": WIDE,
    "special_i1e": WIDE,
    "special_log_ndtr": WIDE,
    "special_ndtri": PROBABILITIES,
    "sinc": WIDE,
}
BESSEL = ["airy_ai", "bessel_j0", "bessel_j1", "bessel_y0", "bessel_y1", "spherical_bessel_j0"]
BESSEL += [
    "modified_bessel_i0",
    "modified_bessel_i1",
    "modified_bessel_k0",
    "modified_bessel_k1",
    "scaled_modified_bessel_k0",
    "scaled_modified_bessel_k1",
]


def op_of(name):
    return getattr(aten, name).default


def low(op):
    return lowerings.lookup(op).fn


def grid(*axes):
    return (torch.tensor(v) for v in zip(*itertools.product(*axes), strict=True))


@pytest.mark.parametrize("name", UNARY)
@together
def test_unary(name):
    x = UNARY[name]
    check(op_of(name), x, atol=1e-30, rtol=3e-6)
    check(op_of(name), x.double(), atol=1e-30, rtol=1e-11)
    check(op_of(name), torch.tensor([[True, False]]), jit=False)
    check(op_of(name), torch.tensor(1), jit=False)
    check(op_of(name), torch.empty(2, 0), jit=False)
    if name not in ("special_erfcx", "special_log_ndtr", "special_ndtri"):  # no CPU kernel of torch's to compare with
        check(op_of(name), x[:40].bfloat16(), jit=False)


@together
def test_sinc_of_half_and_complex():
    check(aten.sinc.default, torch.randn(5, dtype=torch.complex64))


@pytest.mark.parametrize("name", BESSEL)
@together
def test_bessel(name):
    op = op_of(f"special_{name}")
    check(op, WIDE, atol=1e-5, rtol=1e-5)
    check(op, WIDE.double(), atol=1e-6, rtol=1e-5)  # torch's own float64 error
    check(op, torch.tensor([1, 20]), jit=False)
    check(op, torch.empty(0), jit=False)


def test_bessel_agrees_with_scipy_in_float64():
    from scipy import special as sp

    x = np.concatenate([np.linspace(-30, 30, 301), [1e-10, 1e-3, 100.0, 1000.0]])
    with _compat.enable_x64(), np.errstate(all="ignore"):
        for name, fn in [
            ("bessel_j0", sp.j0),
            ("bessel_j1", sp.j1),
            ("bessel_y0", sp.y0),
            ("bessel_y1", sp.y1),
            ("airy_ai", lambda v: sp.airy(v)[0]),
        ]:
            v = np.abs(x[x != 0]) if "_y" in name else x
            np.testing.assert_allclose(np.asarray(low(op_of(f"special_{name}"))(jnp.asarray(v))), fn(v), rtol=1e-11, atol=1e-13)


def families():
    names = (
        name.removeprefix("aten::").split(".")[0] for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::special_")
    )
    return sorted({name for name in names if "_polynomial_" in name})


def test_all_polynomial_families_are_found():
    assert len(families()) == 12


@pytest.mark.thorough(keep=6)
@pytest.mark.parametrize("name", families())
def test_polynomials(name):
    x, n = grid([-3.0, -1.5, -1.0, -0.99, -0.1, 0.0, 0.2, 0.5, 1.0, 1.2, INF], [-2.0, 0.0, 1.0, 2.0, 3.0, 6.0, 7.0, 8.0, 9.0, 30.0, 130.0])
    check(op_of(name), x, n, rtol=3e-5, atol=1e-5)
    check(op_of(name), x.double(), n.double(), rtol=1e-9, atol=1e-9, jit=False)
    check(op_of(name), torch.tensor([2, 3, 4]), torch.tensor([[1], [2]]), jit=False)
    check(getattr(aten, name).n_scalar, torch.rand(3), 4)
    check(getattr(aten, name).x_scalar, 0.3, torch.tensor([1.0, 5.0, 12.7]), jit=False)
    with _compat.enable_x64():
        lifted = dtypes.Scalar(int, jnp.asarray(4, jnp.int64))
        got = to_torch(low(getattr(aten, name).n_scalar)(to_jax(torch.full((2,), 0.3)), lifted))
    torch.testing.assert_close(got, getattr(aten, name).n_scalar(torch.full((2,), 0.3), 4))


def test_polynomial_of_nan_is_nan():
    """torch returns an uninitialised variable in most families."""
    with _compat.enable_x64():
        assert np.isnan(np.asarray(low(aten.special_legendre_polynomial_p.default)(jnp.asarray([NAN]), jnp.asarray([3.0])))).all()


@pytest.mark.parametrize("op", [aten.igamma.default, aten.igammac.default])
@together
def test_incomplete_gamma(op):
    a, x = grid([0.0, 0.1, 0.5, 1.0, 2.0, 5.0, 20.0, -1.0, INF, NAN], [0.0, 0.1, 0.5, 1.0, 2.0, 5.0, 20.0, 1000.0, -1.0, INF, NAN])
    check(op, a, x, rtol=1e-5, atol=1e-5)
    check(op, a.double(), x.double(), rtol=1e-9, atol=1e-9, jit=False)
    check(op, torch.rand(3, 1), torch.tensor(2.0), jit=False)


def test_zeta():
    x, q = grid([-1.0, 0.0, 0.5, 1.0, 1.1, 2.0, 3.0, 5.5, 20.0, NAN], [-3.5, -2.0, -1.0, -0.5, 0.0, 0.1, 0.5, 1.0, 5.0, 1000.0, NAN])
    check(aten.special_zeta.default, x, q, rtol=1e-5, atol=1e-5)
    check(aten.special_zeta.default, x.double(), q.double(), rtol=1e-11, atol=1e-11)
    check(aten.special_zeta.self_scalar, 2, POSITIVE[:12], rtol=1e-5, atol=1e-5)
    check(aten.special_zeta.other_scalar, POSITIVE[4:10], 1.5, rtol=1e-5, atol=1e-5)
    check(aten.special_zeta.default, torch.tensor([2, 3]), torch.tensor([1, 2]), jit=False)
    with pytest.raises(NotImplementedError, match="detach it"), _compat.enable_x64():
        jax.grad(lambda v: low(aten.special_zeta.default)(v, v + 1.0).sum())(jnp.full((2,), 2.0))


def test_xlog1py():
    x, y = grid([0.0, 1.0, -2.0, INF, NAN], [0.0, -1.0, 2.0, INF, NAN])
    check(aten.special_xlog1py.default, x, y)
    check(aten.special_xlog1py.default, torch.tensor([0, 2]), torch.tensor([1.0, 2.0], dtype=torch.float64))
    check(aten.special_xlog1py.other_scalar, x, 2)
    check(aten.special_xlog1py.self_scalar, 0, y)
    with _compat.enable_x64():
        got = to_torch(low(aten.special_xlog1py.other_scalar)(to_jax(x), dtypes.Scalar(float, jnp.asarray(0.5, jnp.float64))))
    torch.testing.assert_close(got, torch.special.xlog1py(x, 0.5), equal_nan=True)


@pytest.mark.parametrize("n", range(5))
@together
def test_polygamma(n):
    # No torch value to compare at the poles of order 1: it is a large finite number.
    x = torch.tensor([0.01, 0.3, 0.5, 1.0, 1.2, 2.0, 7.5, 30.0, 1e4, -0.5, -1.25, -7.3, INF, NAN] + ([0.0, -0.0, -3.0] if n != 1 else []))
    check(aten.polygamma.default, n, x, rtol=1e-4, atol=1e-5)
    check(aten.polygamma.default, n, x.double(), rtol=1e-9, atol=1e-9, jit=False)
    check(aten.polygamma.default, n, torch.tensor([1, 2]), jit=False)
    check(aten.polygamma.default, n, torch.tensor([0.5, 2.0]).bfloat16(), jit=False)


@together
def test_mvlgamma():
    check(aten.mvlgamma.default, torch.rand(4) + 1.5, 3)
    check(aten.mvlgamma.default, torch.tensor([3, 4]), 2)


GRADS = [
    ("entr", torch.special.entr, aten.special_entr.default, [0.0, 0.3, 2.0]),
    ("erfcx", torch.special.erfcx, aten.special_erfcx.default, [-2.0, 0.0, 5.0]),
    ("log_ndtr", torch.special.log_ndtr, aten.special_log_ndtr.default, [-40.0, -2.0, 0.0, 3.0, 30.0]),
    ("ndtri", torch.special.ndtri, aten.special_ndtri.default, [0.1, 0.5, 0.999]),
    ("i0e", torch.special.i0e, aten.special_i0e.default, [-3.0, 0.0, 2.0]),
    ("i1", torch.special.i1, aten.special_i1.default, [-3.0, 0.0, 2.0]),
    ("i1e", torch.special.i1e, aten.special_i1e.default, [-3.0, 0.0, 2.0]),
    ("sinc", torch.sinc, aten.sinc.default, [-1.3, 0.0, 2.0]),
    ("polygamma 0", lambda x: torch.polygamma(0, x), lambda x: low(aten.polygamma.default)(0, x), [0.3, -1.4, 5.0]),
    ("polygamma 1", lambda x: torch.polygamma(1, x), lambda x: low(aten.polygamma.default)(1, x), [0.3, -1.4, 5.0]),
    ("zeta", lambda x: torch.special.zeta(2.0, x), lambda x: low(aten.special_zeta.self_scalar)(2.0, x), [0.3, 1.4, 5.0]),
    (
        "igamma",
        lambda x: torch.igamma(torch.full_like(x, 2.0), x),
        lambda x: low(aten.igamma.default)(jnp.full_like(x, 2.0), x),
        [0.3, 1.4, 5.0],
    ),
    (
        "igammac",
        lambda x: torch.igammac(torch.full_like(x, 2.0), x),
        lambda x: low(aten.igammac.default)(jnp.full_like(x, 2.0), x),
        [0.3, 1.4, 5.0],
    ),
    ("xlog1py", lambda x: torch.special.xlog1py(x, x), lambda x: low(aten.special_xlog1py.default)(x, x), [0.5, 1.4, 5.0]),
    ("mvlgamma", lambda x: torch.mvlgamma(x, 2), lambda x: low(aten.mvlgamma.default)(x, 2), [0.7, 1.4, 5.0]),
]


@pytest.mark.thorough(keep=5)
@pytest.mark.parametrize(("name", "reference", "lowered", "points"), GRADS, ids=[g[0] for g in GRADS])
def test_gradients(name, reference, lowered, points):
    x = torch.tensor(points, dtype=torch.float64, requires_grad=True)
    reference(x).sum().backward()
    fn = low(lowered) if isinstance(lowered, torch._ops.OpOverload) else lowered
    with _compat.enable_x64():
        got = jax.grad(lambda v: fn(v).sum())(to_jax(x))
    np.testing.assert_allclose(np.asarray(got), x.grad.numpy(), rtol=1e-8, atol=1e-10)
