"""Matrix factorisations and the solvers built on them, in torch's output conventions.

Pivots are 1-based int32 as LAPACK counts them, `info` is int32 (0: success, k: the k-th minor or pivot failed) and results
that a flag switches off are empty tensors of shape (0,). Batches and empty matrices go to JAX as they are: its kernels
take both. JAX's gradients of factorisations are used, except where torch's differ or JAX has none (see each function).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from torch_bridge.lowerings.registry import lowering
from torch_bridge.lowerings.types import Array, DType

aten = torch.ops.aten

_matmul = partial(jnp.matmul, precision=lax.Precision.HIGHEST)


def _adjoint(x: Array) -> Array:
    return jnp.swapaxes(x, -1, -2).conj()


def _transpose(x: Array) -> Array:
    return jnp.swapaxes(x, -1, -2)


def _empty(dtype: DType) -> Array:
    return jnp.zeros((0,), dtype)


def _real_dtype(x: Array) -> np.dtype:
    return jnp.finfo(x.dtype).dtype


def _share_batch(a: Array, b: Array) -> tuple[Array, Array]:
    """Broadcast the batch dims of two stacks of matrices."""
    batch = jnp.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    return jnp.broadcast_to(a, batch + a.shape[-2:]), jnp.broadcast_to(b, batch + b.shape[-2:])


# Cholesky and Hermitian eigenproblems


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def _hermitian(a: Array, lower: bool) -> Array:
    """The Hermitian matrix that one triangle of `a` describes; its gradient is symmetric, as torch's is."""
    strict = jnp.tril(a, -1) if lower else jnp.triu(a, 1)
    eye = jnp.eye(a.shape[-1], dtype=bool)
    return jnp.where(eye, a.real.astype(a.dtype), strict + _adjoint(strict))


@_hermitian.defjvp
def _hermitian_jvp(lower: bool, primals: Sequence[Array], tangents: Sequence[Array]) -> tuple[Array, Array]:
    return _hermitian(primals[0], lower), (tangents[0] + _adjoint(tangents[0])) / 2


def _first_bad_minor(a: Array) -> Array:
    """The order of the first leading minor of a Hermitian matrix that is not positive definite (0: none)."""
    rows = jnp.arange(a.shape[-1])

    def column(j: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
        factor, info = state
        pivot = a[j, j].real - jnp.sum(jnp.abs(factor[j]) ** 2)
        info = jnp.where((info == 0) & ~(pivot > 0), j + 1, info)
        below = (a[:, j] - _matmul(factor, factor[j].conj())) / jnp.sqrt(pivot)
        return factor.at[:, j].set(jnp.where(rows >= j, below, 0)), info

    return lax.fori_loop(0, a.shape[-1], column, (jnp.zeros_like(a), jnp.int32(0)))[1].astype(jnp.int32)


def _cholesky_info(a: Array, factor: Array) -> Array:
    """LAPACK's info; the walk over the minors only runs when a factor holds the NaNs that JAX reports failure with."""
    batch, n = a.shape[:-2], a.shape[-1]
    if a.size == 0:
        return jnp.zeros(batch, jnp.int32)
    failed = jnp.any(jnp.isnan(factor), axis=(-2, -1))
    walk = lambda: lax.map(_first_bad_minor, a.reshape(-1, n, n)).reshape(batch)  # noqa: E731
    info = lax.cond(jnp.any(failed), walk, lambda: jnp.zeros(batch, jnp.int32))
    return jnp.where(failed, jnp.where(info == 0, n, info), 0).astype(jnp.int32)


@lowering(aten.cholesky.default)
def _cholesky(self: Array, upper: bool = False) -> Array:
    """Where torch raises for a matrix that is not positive definite, the factor is NaN."""
    factor = lax.linalg.cholesky(_hermitian(self, not upper), symmetrize_input=False)
    return _adjoint(factor) if upper else factor


@lowering(aten.linalg_cholesky_ex.default)
def _cholesky_ex(self: Array, *, upper: bool = False, check_errors: bool = False) -> tuple[Array, Array]:
    factor = _cholesky(self, upper)
    return factor, _cholesky_info(*map(lax.stop_gradient, (_hermitian(self, not upper), factor)))


@lowering(aten._linalg_eigh.default)
def _eigh(A: Array, UPLO: str = "L", compute_v: bool = True) -> tuple[Array, Array]:
    vectors, values = lax.linalg.eigh(_hermitian(A, UPLO.upper() == "L"), symmetrize_input=False)
    return values, vectors if compute_v else _empty(A.dtype)


def _cholesky_solve_with(factor: Array, b: Array, upper: bool) -> Array:
    factor, b = _share_batch(factor, b)
    solve = partial(lax.linalg.triangular_solve, factor, left_side=True, lower=not upper)
    # A = L L^H or U^H U: first the factor on the left of the product, then the other.
    first = solve(b, transpose_a=upper, conjugate_a=upper)
    return solve(first, transpose_a=not upper, conjugate_a=not upper)


@lowering(aten.cholesky_solve.default, aten._cholesky_solve_helper.default)
def _cholesky_solve(self: Array, input2: Array, upper: bool = False) -> Array:
    return _cholesky_solve_with(input2, self, upper)


@lowering(aten.cholesky_inverse.default)
def _cholesky_inverse(self: Array, upper: bool = False) -> Array:
    return _cholesky_solve_with(self, jnp.eye(self.shape[-1], dtype=self.dtype), upper)


# Triangular systems


@lowering(aten.linalg_solve_triangular.default)
def _solve_triangular(self: Array, B: Array, *, upper: bool, left: bool = True, unitriangular: bool = False) -> Array:
    a, b = _share_batch(self, B)
    return lax.linalg.triangular_solve(a, b, left_side=left, lower=not upper, unit_diagonal=unitriangular)


@lowering(aten.triangular_solve.default)
def _triangular_solve(
    self: Array, A: Array, upper: bool = True, transpose: bool = False, unitriangular: bool = False
) -> tuple[Array, Array]:
    a, b = _share_batch(A, self)
    return lax.linalg.triangular_solve(a, b, left_side=True, lower=not upper, transpose_a=transpose, unit_diagonal=unitriangular), a


# Orthogonal factorisations


@lowering(aten.linalg_qr.default)
def _qr(A: Array, mode: str = "reduced") -> tuple[Array, Array]:
    q, r = lax.linalg.qr(A, full_matrices=mode == "complete")
    return (_empty(A.dtype) if mode == "r" else q), r


@lowering(aten.geqrf.default)
def _geqrf(self: Array) -> tuple[Array, Array]:
    h, tau = jnp.linalg.qr(self, mode="raw")
    return _transpose(h), tau


@lowering(aten.linalg_householder_product.default)
def _householder_product(input: Array, tau: Array) -> Array:
    return lax.linalg.householder_product(input, tau)


@lowering(aten.ormqr.default)
def _ormqr(self: Array, input2: Array, input3: Array, left: bool = True, transpose: bool = False) -> Array:
    return lax.linalg.ormqr(self, input2, input3, left=left, transpose=transpose)


@lowering(aten._linalg_svd.default)
def _svd(A: Array, full_matrices: bool = False, compute_uv: bool = True, *, driver: str | None = None) -> tuple[Array, Array, Array]:
    if not compute_uv:
        return _empty(A.dtype), lax.linalg.svd(A, compute_uv=False), _empty(A.dtype)
    u, s, vh = lax.linalg.svd(A, full_matrices=full_matrices)
    return u, s, vh


@lowering(aten.linalg_eig.default)
def _eig(self: Array) -> tuple[Array, Array]:
    values, vectors = lax.linalg.eig(self, compute_left_eigenvectors=False)
    return values, vectors


@lowering(aten._linalg_eigvals.default)
def _eigvals(self: Array) -> Array:
    return lax.linalg.eig(self, compute_left_eigenvectors=False, compute_right_eigenvectors=False)[0]


# Pseudo-inverse and least squares


@jax.custom_jvp
def _pinv(a: Array, atol: Array, rtol: Array) -> Array:
    u, s, vh = lax.linalg.svd(a, full_matrices=False)
    tolerance = jnp.maximum(atol, rtol * jnp.max(s, axis=-1))[..., None]
    kept = s > tolerance
    inverse = jnp.where(kept, 1 / jnp.where(kept, s, 1), 0).astype(a.dtype)
    return _matmul(_adjoint(vh) * inverse[..., None, :], _adjoint(u))


@_pinv.defjvp
def _pinv_jvp(primals: Sequence[Array], tangents: Sequence[Array]) -> tuple[Array, Array]:
    """The derivative at constant rank, which has no 1 / (s_i - s_j) as that of the SVD does."""
    a, da = primals[0], tangents[0]
    p = _pinv(*primals)
    ph, dah = _adjoint(p), _adjoint(da)
    d = -_matmul(_matmul(p, da), p)
    d += _matmul(_matmul(p, ph), dah - _matmul(_matmul(dah, a), p))
    d += _matmul(dah - _matmul(p, _matmul(a, dah)), _matmul(ph, p))
    return p, d


@lowering(aten.linalg_pinv.atol_rtol_tensor)
def _linalg_pinv(self: Array, *, atol: Array | None = None, rtol: Array | None = None, hermitian: bool = False) -> Array:
    if self.size == 0:
        return jnp.zeros((*self.shape[:-2], self.shape[-1], self.shape[-2]), self.dtype)
    real = _real_dtype(self)
    default = jnp.asarray(jnp.finfo(real).eps * max(self.shape[-2:]), real)
    if rtol is None:
        rtol = default if atol is None else jnp.where(atol > 0, 0, default)
    atol = jnp.zeros((), real) if atol is None else atol
    # Of a Hermitian matrix torch reads the lower triangle only.
    return _pinv(_hermitian(self, True) if hermitian else self, *(lax.stop_gradient(t).astype(real) for t in (atol, rtol)))


@lowering(aten.linalg_lstsq.default)
def _lstsq(self: Array, b: Array, rcond: float | None = None, *, driver: str | None = None) -> tuple[Array, Array, Array, Array]:
    """Full-rank least squares by QR ("gels", the default and only driver that torch has on accelerators)."""
    if driver not in (None, "gels"):
        raise NotImplementedError(
            f"aten.linalg_lstsq with driver={driver!r}: the shape of its residuals depends on the rank of the values. "
            "Use driver='gels', torch.linalg.pinv(A) @ B for a rank-deficient A, or a CPU tensor."
        )
    vector = b.ndim == 1 or (self.ndim - 1 == b.ndim and b.shape == self.shape[:-1])
    a, rhs = _share_batch(self, b[..., None] if vector else b)
    (m, n), tall = a.shape[-2:], a.shape[-2] >= a.shape[-1]
    q, r = lax.linalg.qr(a if tall else _adjoint(a), full_matrices=False)
    solve = partial(lax.linalg.triangular_solve, r, left_side=True, lower=False)
    x = solve(_matmul(_adjoint(q), rhs)) if tall else _matmul(q, solve(rhs, transpose_a=True, conjugate_a=True))
    real = _real_dtype(a)
    residuals = jnp.sum(jnp.abs(rhs - _matmul(a, x)) ** 2, axis=-2) if m > n else _empty(real)
    return x[..., 0] if vector else x, residuals, _empty(jnp.int64), _empty(real)


# Small ones


@lowering(aten.linalg_cross.default)
def _cross(self: Array, other: Array, *, dim: int = -1) -> Array:
    a, b = jnp.broadcast_arrays(self, other)
    turn = partial(jnp.roll, axis=dim)
    return turn(a, -1) * turn(b, -2) - turn(a, -2) * turn(b, -1)
