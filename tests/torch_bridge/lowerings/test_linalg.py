"""Linear algebra lowerings against eager torch: factors, pivots, info, batches, empty matrices, gradients."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import torch_bridge.lowerings as lowerings
from tests.torch_bridge.lowerings.batches import together
from tests.torch_bridge.lowerings.parity import check, to_jax, to_torch
from torch_bridge import _compat

aten = torch.ops.aten
C, D = torch.complex64, torch.float64


def rand(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def spd(*shape, dtype=torch.float32):
    a = rand(*shape, dtype=dtype)
    return a @ a.mH + 0.5 * torch.eye(shape[-1], dtype=dtype)


def one_triangle(a, lower):
    """NaN in the triangle that must not be read."""
    ones = torch.ones(a.shape, dtype=torch.bool)
    return a.masked_fill(ones.triu(1) if lower else ones.tril(-1), torch.nan)


def low(op):
    return lowerings.lookup(op).fn


S4, S3D, SC, A4, A43, A34, AC = (
    spd(4, 4),
    spd(2, 3, 3, dtype=D),
    spd(3, 3, dtype=C),
    rand(4, 4),
    rand(4, 3),
    rand(3, 4),
    rand(3, 3, dtype=C),
)
L4, LB = torch.linalg.cholesky(S4), torch.linalg.cholesky(S3D)
LU4, LUC = torch.linalg.lu_factor(A4), torch.linalg.lu_factor(AC)
LUB = torch.linalg.lu_factor(rand(2, 1, 3, 3))
# Powers of two: the eliminations of it and of its transpose are exact on every CPU, and so are the ties between pivots.
SINGULAR = torch.tensor([[1.0, 2, 4], [2, 4, 8], [0, 0, 1]])
SWAP = torch.tensor([[0.0, 1, 0], [0, 0, 1], [1, 0, 0]])
E0, E03, E30, B0 = torch.empty(0, 0), torch.empty(0, 3), torch.empty(3, 0), torch.empty(2, 0, 0)

CASES = [
    (aten.linalg_cholesky_ex.default, (S4,), {}),
    (aten.linalg_cholesky_ex.default, (one_triangle(S4, True),), {}),
    (aten.linalg_cholesky_ex.default, (one_triangle(S4, False),), {"upper": True}),
    (aten.linalg_cholesky_ex.default, (S3D,), {"upper": True}),
    (aten.linalg_cholesky_ex.default, (SC,), {}),
    (aten.linalg_cholesky_ex.default, (B0,), {}),
    (aten.cholesky.default, (S3D,), {}),
    (aten.cholesky.default, (SC, True), {}),
    (aten._linalg_eigh.default, (one_triangle(S4, True), "L", False), {}),
    (aten._linalg_eigh.default, (one_triangle(S4, False), "U", False), {}),
    (aten._linalg_eigh.default, (S3D, "L", False), {}),
    (aten._linalg_eigh.default, (B0,), {}),
    (aten.cholesky_solve.default, (A43, L4), {}),
    (aten.cholesky_solve.default, (A43, L4.mT, True), {}),
    (aten.cholesky_solve.default, (rand(3, 2, dtype=D), LB), {}),
    (aten.cholesky_solve.default, (rand(3, 2, dtype=C), torch.linalg.cholesky(SC)), {}),
    (aten.cholesky_inverse.default, (L4,), {}),
    (aten.cholesky_inverse.default, (LB.mT, True), {}),
    (aten.linalg_solve_triangular.default, (L4, A43), {"upper": False}),
    (aten.linalg_solve_triangular.default, (L4.mT, A43), {"upper": True, "unitriangular": True}),
    (aten.linalg_solve_triangular.default, (L4, A34), {"upper": False, "left": False}),
    (aten.linalg_solve_triangular.default, (LB, rand(2, 1, 3, 2, dtype=D)), {"upper": False}),
    (aten.linalg_solve_triangular.default, (E0, torch.empty(0, 2)), {"upper": True}),
    (aten.triangular_solve.default, (A43, L4.mT), {}),
    (aten.triangular_solve.default, (A43, L4, False, True), {}),
    (aten.triangular_solve.default, (rand(3, 2, dtype=D), LB, False, False, True), {}),
    (aten.triangular_solve.default, (rand(3, 2, dtype=C), torch.linalg.cholesky(SC), False, True), {}),
    (aten.linalg_qr.default, (A43,), {}),
    (aten.linalg_qr.default, (A43, "complete"), {}),
    (aten.linalg_qr.default, (A34, "r"), {}),
    (aten.linalg_qr.default, (rand(2, 3, 3, dtype=D),), {}),
    (aten.linalg_qr.default, (E30,), {}),
    (aten.linalg_qr.default, (AC,), {}),
    (aten.geqrf.default, (A43,), {}),
    (aten.linalg_householder_product.default, torch.geqrf(A43), {}),
    (aten.linalg_householder_product.default, (A43, torch.geqrf(A43)[1][:2]), {}),
    (aten.linalg_householder_product.default, torch.geqrf(rand(2, 4, 3, dtype=D)), {}),
    (aten.ormqr.default, (*torch.geqrf(A43), rand(4, 2)), {}),
    (aten.ormqr.default, (*torch.geqrf(A43), rand(2, 4), False, True), {}),
    (aten._linalg_svd.default, (rand(2, 3, 3, dtype=D), False, False), {}),
    (aten._linalg_svd.default, (E30,), {}),
    (aten._linalg_svd.default, (E03, True), {}),
    (aten.linalg_eig.default, (A4,), {}),
    (aten.linalg_eig.default, (B0,), {}),
    (aten._linalg_eigvals.default, (rand(2, 3, 3, dtype=D),), {}),
    (aten.linalg_lu_factor_ex.default, (A4,), {}),
    (aten.linalg_lu_factor_ex.default, (A43,), {}),
    (aten.linalg_lu_factor_ex.default, (A34,), {}),
    (aten.linalg_lu_factor_ex.default, (SINGULAR,), {}),
    (aten.linalg_lu_factor_ex.default, (torch.zeros(2, 3, 3),), {}),
    (aten.linalg_lu_factor_ex.default, (B0,), {}),
    (aten.linalg_lu_factor_ex.default, (AC,), {}),
    (aten.linalg_lu.default, (SWAP,), {}),
    (aten.linalg_lu.default, (A43,), {}),
    (aten.linalg_lu.default, (rand(2, 3, 4, dtype=D),), {}),
    (aten.lu_unpack.default, LU4, {}),
    (aten.lu_unpack.default, torch.linalg.lu_factor(A34), {}),
    (aten.lu_unpack.default, (*LU4, False, True), {}),
    (aten.lu_unpack.default, (*LU4, True, False), {}),
    *[
        (aten.linalg_lu_solve.default, (*lu, b if left else b.mT), {"left": left, "adjoint": adjoint})
        for lu, b in ((LU4, A43), (LUC, rand(3, 2, dtype=C)), (LUB, rand(5, 3, 2)))
        for left in (True, False)
        for adjoint in (True, False)
    ],
    (aten._linalg_solve_ex.default, (A4, A43), {}),
    (aten._linalg_solve_ex.default, (A4, rand(4)), {}),
    (aten._linalg_solve_ex.default, (A4, A34), {"left": False}),
    (aten._linalg_solve_ex.default, (rand(2, 3, 3, dtype=D), rand(2, 3, dtype=D)), {}),
    (aten._linalg_solve_ex.default, (rand(2, 3, 3, dtype=D), rand(3, 2, dtype=D)), {}),
    (aten._linalg_solve_ex.default, (A4, rand(5, 4, 2)), {}),
    (aten._linalg_solve_ex.default, (AC, rand(3, 2, dtype=C)), {}),
    (aten._linalg_solve_ex.default, (E0, torch.empty(0, 2)), {}),
    (aten.linalg_inv_ex.default, (A4,), {}),
    (aten.linalg_inv_ex.default, (rand(2, 3, 3, dtype=D),), {}),
    (aten.linalg_inv_ex.default, (B0,), {}),
    *[
        (op, (a,), {})
        for op in (aten._linalg_det.default, aten._linalg_slogdet.default)
        for a in (A4, AC, SWAP, SINGULAR, rand(2, 3, 3, dtype=D), B0)
    ],
    (aten.linalg_pinv.atol_rtol_tensor, (A43,), {}),
    (aten.linalg_pinv.atol_rtol_tensor, (SINGULAR,), {}),
    (aten.linalg_pinv.atol_rtol_tensor, (one_triangle(S4, True),), {"hermitian": True}),
    (aten.linalg_pinv.atol_rtol_tensor, (E30,), {}),
    (aten.linalg_lstsq.default, (A43, rand(4, 2)), {"driver": "gels"}),
    (aten.linalg_lstsq.default, (A34, rand(3, 2)), {"driver": "gels"}),
    (aten.linalg_lstsq.default, (rand(2, 4, 3, dtype=D), rand(2, 4, dtype=D)), {"driver": "gels"}),
    (aten.linalg_lstsq.default, (rand(4, 3, dtype=C), rand(4, 2, dtype=C)), {"driver": "gels"}),
    (aten.linalg_cross.default, (rand(2, 3), rand(2, 3, seed=1)), {}),
    (aten.linalg_cross.default, (torch.arange(3)[None], torch.arange(6).reshape(2, 3)), {}),
    (aten.linalg_cross.default, (rand(3, 2, dtype=C), rand(3, 1, dtype=C)), {"dim": 0}),
    (aten.linalg_matrix_exp.default, (A4,), {}),
    (aten.linalg_matrix_exp.default, (30 * rand(2, 2, 2, dtype=D),), {}),
    (aten.linalg_matrix_exp.default, (torch.stack([1e-6 * A4, A4, 4 * A4]),), {}),
    (aten.linalg_matrix_exp.default, (AC,), {}),
    (aten.linalg_matrix_exp.default, (torch.zeros(1, 1),), {}),
    (aten.linalg_matrix_exp.default, (B0,), {}),
]


@pytest.mark.parametrize(("op", "args", "kwargs"), CASES, ids=[c[0].name()[6:] for c in CASES])
@pytest.mark.filterwarnings(
    "ignore:torch.triangular_solve:UserWarning", "ignore:torch.cholesky:UserWarning", "ignore:.*will be removed:UserWarning"
)
@together
def test_values(op, args, kwargs):
    wide = args[0].dtype in (D, torch.complex128)
    check(op, *args, **kwargs, rtol=1e-9 if wide else 2e-4, atol=1e-9 if wide else 2e-5)


@pytest.mark.parametrize(("a", "uplo"), [(S4, "L"), (S4, "U"), (S3D, "L"), (SC, "L"), (SC, "U")])
def test_eigenvectors_up_to_phase(a, uplo):
    with _compat.enable_x64():
        values, vectors = (to_torch(x) for x in low(aten._linalg_eigh.default)(to_jax(one_triangle(a, uplo == "L")), uplo))
    torch.testing.assert_close(values, torch.linalg.eigvalsh(a), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close((vectors * values[..., None, :].to(a.dtype)) @ vectors.mH, a, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("full", [True, False])
@pytest.mark.parametrize("a", [A43, A34, AC, rand(2, 3, 4, dtype=D)])
def test_singular_vectors_up_to_phase(a, full):
    expected = aten._linalg_svd(a, full)
    with _compat.enable_x64():
        u, s, vh = (to_torch(x) for x in low(aten._linalg_svd.default)(to_jax(a), full))
    assert [(t.shape, t.dtype) for t in (u, s, vh)] == [(t.shape, t.dtype) for t in expected]
    torch.testing.assert_close(s, expected[1], rtol=1e-4, atol=1e-5)
    k = s.shape[-1]
    torch.testing.assert_close((u[..., :k] * s[..., None, :].to(a.dtype)) @ vh[..., :k, :], a, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(u.mH @ u, torch.eye(u.shape[-1], dtype=a.dtype).expand_as(u.mH @ u), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("tolerance", [{"rtol": torch.tensor([0.5, 1e-3], dtype=D)}, {"atol": torch.tensor(1.0, dtype=D)}])
def test_pinv_cuts_small_singular_values(tolerance):
    a = rand(2, 3, 4, dtype=D)
    with _compat.enable_x64():
        got = to_torch(low(aten.linalg_pinv.atol_rtol_tensor)(to_jax(a), **{k: to_jax(v) for k, v in tolerance.items()}))
    torch.testing.assert_close(got, torch.linalg.pinv(a, **tolerance))


def test_cholesky_info_names_the_failing_minor():
    bad = S4.repeat(4, 1, 1)
    bad[1, 2, 2], bad[2, 0, 0], bad[3, 3, 3] = -1.0, torch.nan, 0.0
    with _compat.enable_x64():
        factor, info = low(aten.linalg_cholesky_ex.default)(to_jax(bad))
    assert to_torch(info).tolist() == torch.linalg.cholesky_ex(bad).info.tolist() == [0, 3, 1, 4]
    torch.testing.assert_close(to_torch(factor)[0], L4)
    assert to_torch(factor)[1:].isnan().flatten(1).any(1).all()


def test_singular_inverse_reports_info():
    with _compat.enable_x64():
        info = low(aten.linalg_inv_ex.default)(to_jax(torch.stack([SINGULAR, SWAP])))[1]
    assert to_torch(info).tolist() == torch.linalg.inv_ex(torch.stack([SINGULAR, SWAP])).info.tolist()


def test_determinants_of_strided_matrices_factor_them_untransposed():
    for op in (aten._linalg_det.default, aten._linalg_slogdet.default):
        with _compat.enable_x64():
            got = [to_torch(x) for x in low(op)(to_jax(A4.mT), contiguous=False)]
        for g, e in zip(got, op(A4.mT), strict=True):
            torch.testing.assert_close(g, e, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("op", "kwargs", "text"),
    [(aten.linalg_lu.default, {"pivot": False}, "Drop pivot"), (aten.linalg_lu_factor_ex.default, {"pivot": False}, "linalg_lu_factor_ex")],
)
def test_lu_without_pivoting_is_refused(op, kwargs, text):
    with pytest.raises(NotImplementedError, match=text):
        low(op)(jnp.eye(2), **kwargs)


def test_lstsq_by_rank_is_refused():
    with pytest.raises(NotImplementedError, match=r"driver='gelsd'.*Use driver='gels'"):
        low(aten.linalg_lstsq.default)(jnp.eye(2), jnp.ones(2), driver="gelsd")


W = rand(4, 4, seed=5, dtype=D)
GRADS = [  # name, torch function, lowering of the same
    (
        "cholesky",
        lambda a: torch.linalg.cholesky(a @ a.mT + W.abs().diag().diag()),
        lambda a, w: low(aten.linalg_cholesky_ex.default)(a @ a.T + jnp.diag(jnp.diag(abs(w))))[0],
    ),
    (
        "cholesky raw",
        lambda a: torch.linalg.cholesky(a * 0.01 + torch.eye(4, dtype=D)),
        lambda a, w: low(aten.cholesky.default)(a * 0.01 + jnp.eye(4)),
    ),
    ("eigvals", torch.linalg.eigvalsh, lambda a, w: low(aten._linalg_eigh.default)(a, "L", False)[0]),
    ("eigh", lambda a: torch.linalg.eigh(a + a.mT)[1] ** 2, lambda a, w: low(aten._linalg_eigh.default)(a + a.T)[1] ** 2),
    ("svdvals", torch.linalg.svdvals, lambda a, w: low(aten._linalg_svd.default)(a, False, False)[1]),
    ("qr", lambda a: torch.linalg.qr(a)[1], lambda a, w: low(aten.linalg_qr.default)(a)[1]),
    ("solve", lambda a: torch.linalg.solve(a, W * a), lambda a, w: low(aten._linalg_solve_ex.default)(a, w * a)[0]),
    (
        "solve right",
        lambda a: torch.linalg.solve(a, W * a, left=False),
        lambda a, w: low(aten._linalg_solve_ex.default)(a, w * a, left=False)[0],
    ),
    ("inv", torch.linalg.inv, lambda a, w: low(aten.linalg_inv_ex.default)(a)[0]),
    ("lu", lambda a: torch.linalg.lu(a)[2], lambda a, w: low(aten.linalg_lu.default)(a)[2]),
    ("det", lambda a: torch.linalg.det(a)[None], lambda a, w: low(aten._linalg_det.default)(a)[0][None]),
    ("slogdet", lambda a: torch.linalg.slogdet(a)[1][None], lambda a, w: low(aten._linalg_slogdet.default)(a)[1][None]),
    ("pinv", lambda a: torch.linalg.pinv(a[:, :3]), lambda a, w: low(aten.linalg_pinv.atol_rtol_tensor)(a[:, :3])),
    ("lstsq", lambda a: torch.linalg.lstsq(a[:, :3], W, driver="gels")[0], lambda a, w: low(aten.linalg_lstsq.default)(a[:, :3], w)[0]),
    (
        "triangular",
        lambda a: torch.linalg.solve_triangular(a, W, upper=True),
        lambda a, w: low(aten.linalg_solve_triangular.default)(a, w, upper=True),
    ),
    ("cholesky_solve", lambda a: torch.cholesky_solve(W, a.tril()), lambda a, w: low(aten.cholesky_solve.default)(w, jnp.tril(a))),
    ("matrix_exp", torch.linalg.matrix_exp, lambda a, w: low(aten.linalg_matrix_exp.default)(a)),
    ("cross", lambda a: torch.linalg.cross(a[:3], W[:3], dim=0), lambda a, w: low(aten.linalg_cross.default)(a[:3], w[:3], dim=0)),
]


@pytest.mark.parametrize(("name", "reference", "lowered"), GRADS, ids=[g[0] for g in GRADS])
def test_gradients(name, reference, lowered):
    a = (rand(4, 4, dtype=D, seed=3) + 2 * torch.eye(4, dtype=D)).requires_grad_()
    out = reference(a)
    weight = rand(*out.shape, dtype=D, seed=4)
    (out * weight).sum().backward()
    with _compat.enable_x64():
        got = jax.jit(jax.grad(lambda x: (lowered(x, to_jax(W)) * to_jax(weight)).sum()))(to_jax(a))
        np.testing.assert_allclose(np.asarray(got), a.grad.numpy(), rtol=1e-7, atol=1e-9)
