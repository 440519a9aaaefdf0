"""LU factorisation and what torch computes through it: solve, inverse, determinant; and the matrix exponential.

torch's determinants return the LU factors of A^T when A is real and contiguous (LAPACK reads columns), and their backward
formulas count on that. Arrays here have no strides, so `_linalg_det` and `_linalg_slogdet` act as on a contiguous A; for
another A the caller passes `contiguous=False`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax import lax

from torch_bridge.lowerings.registry import lowering
from torch_bridge.lowerings.types import Array, DType

aten = torch.ops.aten

_matmul = partial(jnp.matmul, precision=lax.Precision.HIGHEST)


def _transpose(x: Array) -> Array:
    return jnp.swapaxes(x, -1, -2)


def _diagonal(x: Array) -> Array:
    return jnp.diagonal(x, axis1=-2, axis2=-1)


def _info(lu: Array) -> Array:
    """1-based position of the first zero pivot, or 0."""
    zero = _diagonal(lax.stop_gradient(lu)) == 0
    if zero.shape[-1] == 0:
        return jnp.zeros(zero.shape[:-1], jnp.int32)
    return jnp.where(jnp.any(zero, -1), jnp.argmax(zero, -1) + 1, 0).astype(jnp.int32)


def _factor(a: Array) -> tuple[Array, Array]:
    """LU factors in one matrix and torch's 1-based pivots."""
    lu, pivots, _ = lax.linalg.lu(a)
    return lu, (pivots + 1).astype(jnp.int32)


def _rows(pivots: Array, m: int) -> Array:
    """The row order `perm` of pivots: L U = A[perm]."""
    return lax.linalg.lu_pivots_to_permutation(pivots - 1, m)


def _triangular(lu: Array, b: Array, lower: bool, **flags: Any) -> Array:
    return lax.linalg.triangular_solve(lu, b, left_side=True, lower=lower, unit_diagonal=lower, **flags)


def _solve_factored(lu: Array, pivots: Array, b: Array, adjoint: bool, conjugate: bool = True) -> Array:
    """X of A X = B, or of A^H X = B (A^T where not `conjugate`), from A's LU factors."""
    perm = _rows(pivots, lu.shape[-2])[..., None]
    if not adjoint:
        return _triangular(lu, _triangular(lu, jnp.take_along_axis(b, perm, -2), True), False)
    flags = {"transpose_a": True, "conjugate_a": conjugate}
    x = _triangular(lu, _triangular(lu, b, False, **flags), True, **flags)
    return jnp.take_along_axis(x, jnp.argsort(perm, axis=-2), -2)


def _share_batch(b: Array, lu: Array, pivots: Array) -> tuple[Array, Array, Array]:
    batch = jnp.broadcast_shapes(b.shape[:-2], lu.shape[:-2])
    grow = lambda x, keep: jnp.broadcast_to(x, batch + x.shape[x.ndim - keep :])  # noqa: E731
    return grow(b, 2), grow(lu, 2), grow(pivots, 1)


def _pivoting_only(op: str, pivot: bool) -> None:
    if not pivot:
        raise NotImplementedError(f"{op} with pivot=False: JAX factorises with pivoting only. Drop pivot=False.")


@lowering(aten.linalg_lu_factor_ex.default)
def _lu_factor_ex(A: Array, *, pivot: bool = True, check_errors: bool = False) -> tuple[Array, Array, Array]:
    _pivoting_only("aten.linalg_lu_factor_ex", pivot)
    lu, pivots = _factor(A)
    return lu, pivots, _info(lu)


def _lower_upper(lu: Array) -> tuple[Array, Array]:
    m, n = lu.shape[-2:]
    k = min(m, n)
    return jnp.tril(lu[..., :, :k], -1) + jnp.eye(m, k, dtype=lu.dtype), jnp.triu(lu[..., :k, :])


def _permutation(pivots: Array, m: int, dtype: DType) -> Array:
    """P of A = P L U."""
    return (_rows(pivots, m)[..., None, :] == jnp.arange(m)[:, None]).astype(dtype)


@lowering(aten.linalg_lu.default)
def _lu(A: Array, *, pivot: bool = True) -> tuple[Array, Array, Array]:
    _pivoting_only("aten.linalg_lu", pivot)
    lu, pivots = _factor(A)
    return _permutation(pivots, A.shape[-2], A.dtype), *_lower_upper(lu)


@lowering(aten.lu_unpack.default)
def _lu_unpack(LU_data: Array, LU_pivots: Array, unpack_data: bool = True, unpack_pivots: bool = True) -> tuple[Array, Array, Array]:
    empty = jnp.zeros((0,), LU_data.dtype)
    lower, upper = _lower_upper(LU_data) if unpack_data else (empty, empty)
    return _permutation(LU_pivots, LU_data.shape[-2], LU_data.dtype) if unpack_pivots else empty, lower, upper


@lowering(aten.linalg_lu_solve.default)
def _lu_solve(LU: Array, pivots: Array, B: Array, *, left: bool = True, adjoint: bool = False) -> Array:
    b, lu, pivots = _share_batch(B, LU, pivots)
    if left:
        return _solve_factored(lu, pivots, b, adjoint)
    # X A = B is A^T X^T = B^T; X A^H = B is conj(A) X^T = B^T.
    if adjoint:
        return _transpose(_solve_factored(lu.conj(), pivots, _transpose(b), False))
    return _transpose(_solve_factored(lu, pivots, _transpose(b), True, conjugate=False))


def _solve(a: Array, b: Array, lu: Array, pivots: Array) -> Array:
    """A^-1 B from constant factors, with the gradient of a linear solve in A and B instead of that of the factorisation."""
    a, _, _ = _share_batch(a, lu, pivots)
    b, lu, pivots = _share_batch(b, lu, pivots)
    a, b, lu = (jnp.broadcast_to(x, jnp.broadcast_shapes(x.shape[:-2], b.shape[:-2]) + x.shape[-2:]) for x in (a, b, lu))
    return lax.custom_linear_solve(
        lambda x: _matmul(a, x),
        b,
        lambda _, y: _solve_factored(lu, pivots, y, False),
        lambda _, y: _solve_factored(lu, pivots, y, True, conjugate=False),
    )


@lowering(aten._linalg_solve_ex.default)
def _solve_ex(A: Array, B: Array, *, left: bool = True, check_errors: bool = False) -> tuple[Array, Array, Array, Array]:
    vector = B.ndim == 1 or (A.ndim - 1 == B.ndim and B.shape == A.shape[:-1])
    lu, pivots = _factor(lax.stop_gradient(A))
    b = B[..., None] if vector else B
    if left:
        x = _solve(A, b, lu, pivots)
    else:
        transposed = _factor(lax.stop_gradient(_transpose(A)))
        x = _transpose(_solve(_transpose(A), _transpose(b), *transposed))
    return x[..., 0] if vector else x, lu, pivots, _info(lu)


@lowering(aten.linalg_inv_ex.default)
def _inv_ex(A: Array, *, check_errors: bool = False) -> tuple[Array, Array]:
    x, _, _, info = _solve_ex(A, jnp.broadcast_to(jnp.eye(A.shape[-1], dtype=A.dtype), A.shape))
    return x, info


# Determinants


def _parity(pivots: Array, dtype: DType) -> Array:
    swaps = jnp.sum(pivots != jnp.arange(1, pivots.shape[-1] + 1, dtype=jnp.int32), axis=-1)
    return jnp.where(swaps % 2 == 1, -1, 1).astype(dtype)


def _trace_of_solution(lu: Array, pivots: Array, da: Array) -> tuple[Array, Array]:
    """trace(A^-1 dA); a zero pivot counts as eps, as in torch's backward."""
    eye = jnp.eye(lu.shape[-1], dtype=lu.dtype)
    lu = lu + eye * jnp.where(_diagonal(lu) == 0, jnp.finfo(lu.dtype).eps, 0)[..., None, :].astype(lu.dtype)
    return jnp.sum(_diagonal(_solve_factored(lu, pivots, da, False)), -1), lu


@jax.custom_jvp
def _det(a: Array, lu: Array, pivots: Array) -> Array:
    return _parity(pivots, lu.dtype) * jnp.prod(_diagonal(lu), -1)


@_det.defjvp
def _det_jvp(primals: Sequence[Array], tangents: Sequence[Array]) -> tuple[Array, Array]:
    trace, lu = _trace_of_solution(primals[1], primals[2], tangents[0])
    return _det(*primals), _det(primals[0], lu, primals[2]) * trace


@jax.custom_jvp
def _slogdet(a: Array, lu: Array, pivots: Array) -> tuple[Array, Array]:
    diagonal = _diagonal(lu)
    return _parity(pivots, lu.dtype) * jnp.prod(jnp.sign(diagonal), -1), jnp.sum(jnp.log(jnp.abs(diagonal)), -1)


@_slogdet.defjvp
def _slogdet_jvp(primals: Sequence[Array], tangents: Sequence[Array]) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    trace, _ = _trace_of_solution(primals[1], primals[2], tangents[0])
    sign, logabs = _slogdet(*primals)
    turning = sign * (trace - trace.real)  # the phase moves only for complex matrices
    return (sign, logabs), (turning.astype(sign.dtype), trace.real)


def _as_lapack_sees(A: Array, contiguous: bool) -> Array:
    return A if jnp.iscomplexobj(A) or not contiguous else _transpose(A)


@lowering(aten._linalg_det.default)
def _linalg_det(A: Array, *, contiguous: bool = True) -> tuple[Array, Array, Array]:
    a = _as_lapack_sees(A, contiguous)
    lu, pivots = _factor(lax.stop_gradient(a))
    return _det(a, lu, pivots), lu, pivots


@lowering(aten._linalg_slogdet.default)
def _linalg_slogdet(A: Array, *, contiguous: bool = True) -> tuple[Array, Array, Array, Array]:
    a = _as_lapack_sees(A, contiguous)
    lu, pivots = _factor(lax.stop_gradient(a))
    return *_slogdet(a, lu, pivots), lu, pivots


# Matrix exponential


def _pade(order: int) -> list[float]:
    """Coefficients of the diagonal Pade numerator of exp."""
    f = math.factorial
    return [f(2 * order - k) * f(order) / (f(2 * order) * f(k) * f(order - k)) for k in range(order + 1)]


def _expm_scaled(a: Array, order: int) -> Array:
    """The [order/order] Pade approximant of exp for a matrix of small norm: (V - U)^-1 (V + U)."""
    b, square = _pade(order), _matmul(a, a)
    power = jnp.broadcast_to(jnp.eye(a.shape[-1], dtype=a.dtype), a.shape)
    odd, even = b[1] * power, b[0] * power
    for k in range(2, order, 2):
        power = square if k == 2 else _matmul(power, square)
        odd, even = odd + b[k + 1] * power, even + b[k] * power
    odd = _matmul(a, odd)
    lu, pivots = _factor(even - odd)
    return _solve_factored(lu, pivots, even + odd, False)


@jax.custom_vjp
def _expm(a: Array) -> Array:
    """Scaling and squaring; each matrix of a batch is squared as often as its own norm asks."""
    # Order and norm bound per precision: Higham, "The scaling and squaring method revisited" (2005), table 2.3.
    order, bound = (13, 5.371920351148152) if jnp.finfo(a.dtype).dtype == jnp.float64 else (7, 3.925724783138660)
    norm = jnp.max(jnp.sum(jnp.abs(a), -2), -1)
    halvings = jnp.where(jnp.isfinite(norm), jnp.ceil(jnp.log2(jnp.maximum(norm / bound, 1))), 0).astype(jnp.int32)
    scale = jnp.ldexp(jnp.ones_like(norm), -halvings)[..., None, None]
    state = (jnp.int32(0), _expm_scaled(a * scale.astype(a.dtype), order))

    def square(state: tuple[Array, Array]) -> tuple[Array, Array]:
        i, x = state
        return i + 1, jnp.where((i < halvings)[..., None, None], _matmul(x, x), x)

    return lax.while_loop(lambda s: s[0] < jnp.max(halvings), square, state)[1]


def _expm_backward(a: Array, g: Array) -> tuple[Array]:
    """The upper right block of exp [[A^T, G], [0, A^T]]."""
    n, t = a.shape[-1], _transpose(a)
    block = jnp.concatenate([jnp.concatenate([t, g], -1), jnp.concatenate([jnp.zeros_like(t), t], -1)], -2)
    return (_expm(block)[..., :n, n:],)


_expm.defvjp(lambda a: (_expm(a), a), _expm_backward)


@lowering(aten.linalg_matrix_exp.default)
def _matrix_exp(self: Array) -> Array:
    if self.size == 0:
        return self
    return _expm(self.astype(jnp.promote_types(self.dtype, jnp.float32))).astype(self.dtype)
