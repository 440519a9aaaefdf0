"""Matrix products. float32 stays float32 on every device; half precision accumulates in float32 and rounds once."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import torch
from jax import lax

from torch_bridge.ir import dtypes
from torch_bridge.lowerings._opmath import HALF, wide_dtype, widen
from torch_bridge.lowerings.activations import gelu, relu
from torch_bridge.lowerings.registry import lowering
from torch_bridge.lowerings.types import DType, Scalar

aten = torch.ops.aten
Dims = tuple[tuple[tuple[int, ...], tuple[int, ...]], tuple[tuple[int, ...], tuple[int, ...]]]

_MM: Dims = (((1,), (0,)), ((), ()))
_BMM: Dims = (((2,), (1,)), ((0,), (0,)))
_MV: Dims = (((1,), (0,)), ((), ()))
_DOT: Dims = (((0,), (0,)), ((), ()))
_ADDBMM: Dims = (((0, 2), (0, 1)), ((), ()))


def precision_of(dtype: DType) -> lax.Precision | None:
    """HIGHEST where a GPU or TPU would otherwise round float32 operands."""
    return lax.Precision.HIGHEST if jnp.dtype(dtype) in (jnp.float32, jnp.complex64) else None


def _dot_general(a: jax.Array, b: jax.Array, dims: Dims, out: DType | None = None) -> jax.Array:
    return lax.dot_general(a, b, dims, precision=precision_of(a.dtype), preferred_element_type=out)


def dot(a: jax.Array, b: jax.Array, dims: Dims, out: DType | None = None) -> jax.Array:
    """`lax.dot_general` with result dtype `out` (default: that of `a`).

    Half precision asks for a float32 result (on CPU twice as fast as a half-precision one) and rounds it. Its derivative is
    the plain product, so that gradients are products of two half-precision arrays and not of a float32 and a half one.
    """
    out = a.dtype if out is None else jnp.dtype(out)
    return _dot_general(a, b, dims) if out == a.dtype and a.dtype not in HALF else _dot_to(a, b, dims, out)


@partial(jax.custom_jvp, nondiff_argnums=(2, 3))
def _dot_to(a: jax.Array, b: jax.Array, dims: Dims, out: DType) -> jax.Array:
    """`dot` by way of another dtype than that of its operands."""
    if a.dtype not in HALF:
        return _dot_general(a, b, dims, out).astype(out)
    a, b, dims, single = _without_single_batches(a, b, dims)
    return lax.expand_dims(_dot_general(a, b, dims, jnp.float32).astype(out), single)


def _without_single_batches(a: jax.Array, b: jax.Array, dims: Dims) -> tuple[jax.Array, jax.Array, Dims, tuple[int, ...]]:
    """Operands and dims of a product without batch dims of size 1, and where those are in its result.

    On CPUs XLA chooses the code of a bfloat16 product first and drops these dims then. The product of two transposes that may be left has no such code:
    "Unsupported element type for DotThunk::Execute: BF16 x BF16 = F32".
    """
    contracted, batch = dims
    single = tuple(k for k, d in enumerate(batch[0]) if a.shape[d] == b.shape[batch[1][k]] == 1)
    if not single:
        return a, b, dims, ()
    dropped = [[of[k] for k in single] for of in batch]

    def left(operand: int, of: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(d - sum(gone < d for gone in dropped[operand]) for d in of if d not in dropped[operand])

    a, b = (lax.squeeze(x, gone) for x, gone in zip((a, b), dropped, strict=True))
    return a, b, ((left(0, contracted[0]), left(1, contracted[1])), (left(0, batch[0]), left(1, batch[1]))), single


@_dot_to.defjvp
def _dot_jvp(dims: Dims, out: DType, primals: tuple[jax.Array, ...], tangents: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
    (a, b), (da, db) = primals, tangents
    y = _dot_to(a, b, dims, out)
    return y, (_dot_general(da, b, dims) + _dot_general(a, db, dims)).astype(y.dtype)


class Transposed(NamedTuple):
    """The transpose of a matrix, as an operand of `product`, which reads the matrix as it lies: XLA would divide and gather a transpose by itself."""

    of: jax.Array

    @property
    def dtype(self) -> DType:
        """That of the matrix."""
        return self.of.dtype


Matrix = jax.Array | Transposed


def product(a: Matrix, b: Matrix, out: DType | None = None) -> jax.Array:
    """The product of two matrices, which may be `Transposed`."""
    dims = (((0 if isinstance(a, Transposed) else 1,), (1 if isinstance(b, Transposed) else 0,)), ((), ()))
    return dot(a.of if isinstance(a, Transposed) else a, b.of if isinstance(b, Transposed) else b, dims, out)


def _is_one(scale: Scalar) -> bool:
    return not isinstance(scale, dtypes.Scalar) and scale == 1


def _times(scale: Scalar, x: jax.Array) -> jax.Array:
    return x if _is_one(scale) else dtypes.cast(scale, x.dtype) * x


def _add_scaled(beta: Scalar, self: jax.Array, alpha: Scalar, product: jax.Array, dtype: DType) -> jax.Array:
    """`beta * self + alpha * product` in the opmath dtype. With beta 0, `self` is ignored even where it is NaN."""
    product = _times(alpha, product)
    if _is_one(beta):
        return (widen(self) + product).astype(dtype)
    b = dtypes.cast(beta, product.dtype)
    scaled = jnp.where(b == 0, jnp.zeros((), product.dtype), b * self.astype(product.dtype))
    return (scaled + product).astype(dtype)


def _add_product(
    self: jax.Array, a: jax.Array, b: jax.Array, dims: Dims, beta: Scalar, alpha: Scalar, dtype: torch.dtype | None = None
) -> jax.Array:
    out = a.dtype if dtype is None else dtypes.to_jax(dtype)
    return _add_scaled(beta, self, alpha, dot(a, b, dims, wide_dtype(out)), out)


@lowering(aten.mm.default)
def mm(self: Matrix, mat2: Matrix) -> jax.Array:
    return product(self, mat2)


@lowering(aten.bmm.default)
def bmm(self: jax.Array, mat2: jax.Array) -> jax.Array:
    return dot(self, mat2, _BMM)


@lowering(aten.mm.dtype)
def mm_dtype(self: jax.Array, mat2: jax.Array, out_dtype: torch.dtype) -> jax.Array:
    return dot(self, mat2, _MM, dtypes.to_jax(out_dtype))


@lowering(aten.bmm.dtype)
def bmm_dtype(self: jax.Array, mat2: jax.Array, out_dtype: torch.dtype) -> jax.Array:
    return dot(self, mat2, _BMM, dtypes.to_jax(out_dtype))


@lowering(aten.mv.default)
def mv(self: jax.Array, vec: jax.Array) -> jax.Array:
    return dot(self, vec, _MV)


@lowering(aten.dot.default)
def dot_1d(self: jax.Array, tensor: jax.Array) -> jax.Array:
    return dot(self, tensor, _DOT)


@lowering(aten.vdot.default)
def vdot(self: jax.Array, other: jax.Array) -> jax.Array:
    return dot(jnp.conj(self), other, _DOT)


@lowering(aten.addmm.default)
def addmm(self: jax.Array, mat1: Matrix, mat2: Matrix, *, beta: Scalar = 1, alpha: Scalar = 1) -> jax.Array:
    return _add_scaled(beta, self, alpha, product(mat1, mat2, wide_dtype(mat1.dtype)), mat1.dtype)


@lowering(aten.addmm.dtype)
def addmm_dtype(
    self: jax.Array, mat1: jax.Array, mat2: jax.Array, out_dtype: torch.dtype, *, beta: Scalar = 1, alpha: Scalar = 1
) -> jax.Array:
    return _add_product(self, mat1, mat2, _MM, beta, alpha, out_dtype)


@lowering(aten._addmm_activation.default)
def addmm_activation(
    self: jax.Array, mat1: jax.Array, mat2: jax.Array, *, beta: Scalar = 1, alpha: Scalar = 1, use_gelu: bool = False
) -> jax.Array:
    out = addmm(self, mat1, mat2, beta=beta, alpha=alpha)
    return gelu(out) if use_gelu else relu(out)


@lowering(aten.addmv.default)
def addmv(self: jax.Array, mat: jax.Array, vec: jax.Array, *, beta: Scalar = 1, alpha: Scalar = 1) -> jax.Array:
    return _add_product(self, mat, vec, _MV, beta, alpha)


@lowering(aten.baddbmm.default)
def baddbmm(self: jax.Array, batch1: jax.Array, batch2: jax.Array, *, beta: Scalar = 1, alpha: Scalar = 1) -> jax.Array:
    return _add_product(self, batch1, batch2, _BMM, beta, alpha)


@lowering(aten.baddbmm.dtype)
def baddbmm_dtype(
    self: jax.Array, batch1: jax.Array, batch2: jax.Array, out_dtype: torch.dtype, *, beta: Scalar = 1, alpha: Scalar = 1
) -> jax.Array:
    return _add_product(self, batch1, batch2, _BMM, beta, alpha, out_dtype)


@lowering(aten.addbmm.default)
def addbmm(self: jax.Array, batch1: jax.Array, batch2: jax.Array, *, beta: Scalar = 1, alpha: Scalar = 1) -> jax.Array:
    return _add_product(self, batch1, batch2, _ADDBMM, beta, alpha)


@lowering(aten.addr.default)
def addr(self: jax.Array, vec1: jax.Array, vec2: jax.Array, *, beta: Scalar = 1, alpha: Scalar = 1) -> jax.Array:
    dtype = dtypes.to_jax(dtypes.result_dtype(self, vec1, vec2))
    self, a, b = (dtypes.cast(x, wide_dtype(dtype)) for x in (self, vec1, vec2))
    if dtype == jnp.bool_:
        return (dtypes.cast(beta, dtype) & self) | (dtypes.cast(alpha, dtype) & a[:, None] & b[None, :])
    return _add_scaled(beta, self, alpha, a[:, None] * b[None, :], dtype)


@lowering(aten._int_mm.default)
def int_mm(self: jax.Array, mat2: jax.Array) -> jax.Array:
    return dot(self, mat2, _MM, jnp.int32)


@lowering(aten.linear.default)
def linear(input: jax.Array, weight: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    """`input @ weight.T + bias`, contracting the last dims so that no transpose is needed."""
    dims: Dims = (((input.ndim - 1,), (weight.ndim - 1,)), ((), ()))
    if bias is None:
        return dot(input, weight, dims)
    return (dot(input, weight, dims, wide_dtype(input.dtype)) + widen(bias)).astype(input.dtype)


@lowering(aten.linear_backward.default)
def linear_backward(self: jax.Array, grad_output: jax.Array, weight: jax.Array, output_mask: list[bool]) -> tuple[jax.Array, ...]:
    """Gradients of input, weight and bias; all of them, XLA drops those that nobody reads."""
    leading = tuple(range(grad_output.ndim - 1))
    grad_input = dot(grad_output, weight, (((grad_output.ndim - 1,), (0,)), ((), ())))
    grad_weight = dot(grad_output, self, ((leading, leading), ((), ())))
    return grad_input, grad_weight, jnp.sum(widen(grad_output), axis=leading).astype(grad_output.dtype)


def _matmul(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.matmul(a, b, precision=precision_of(a.dtype))


@lowering(aten.matmul_backward.default)
def matmul_backward(grad: jax.Array, self: jax.Array, other: jax.Array, mask: list[bool]) -> tuple[jax.Array | None, ...]:
    _, vjp = jax.vjp(lambda a, b: _matmul(a, b), jnp.conj(self), jnp.conj(other))
    return tuple(g if wanted else None for g, wanted in zip(vjp(grad), mask, strict=True))
