"""Dtype conversion, fills, `*_like`/`new_*` factories and complex numbers against eager torch."""

from __future__ import annotations

import itertools

import jax
import pytest
import torch

import torch_bridge.lowerings as lowerings
from tests.torch_bridge.lowerings.batches import together
from tests.torch_bridge.lowerings.gradients import check_gradient
from tests.torch_bridge.lowerings.parity import check, to_jax, to_torch
from tests.torch_bridge.lowerings.test_arithmetic import BOOLS, COMPLEX, INTS, T, X, Y, bf16, check_lifted, f16, f64, i32, i64, inf, nan, u8
from torch_bridge import _compat

aten = torch.ops.aten
DTYPES = [torch.bool, u8, torch.int8, torch.int16, i32, i64, bf16, f16, torch.float32, f64, torch.complex64, torch.complex128]
VALUES = T([0.0, -1.0, -1.7, 1.7, 300.0, -300.0, 256.5, 60000.0, 0.1, 100.0])


@pytest.mark.core(keep=50)
@pytest.mark.parametrize("source,target", list(itertools.product(DTYPES, DTYPES)), ids=str)
@together
def test_conversion(source: torch.dtype, target: torch.dtype) -> None:
    check(aten._to_copy.default, VALUES.to(source), dtype=target, jit=source in (torch.float32, f64))


@together
def test_conversion_details() -> None:
    check(aten._to_copy.default, T([nan, 0.0, inf]), dtype=torch.bool)
    check(aten._to_copy.default, T([3e9, -2.0]), dtype=torch.uint32)
    check(aten._to_copy.default, T([70000.0, -2.0]), dtype=torch.uint16)
    check(aten._to_copy.default, X.double() * 1.00000001, dtype=bf16, rtol=0, atol=0)
    check(aten._to_copy.default, T([1.0, 500.0, 0.013, -3.3]), dtype=torch.float32)
    check(aten._to_copy.default, X, memory_format=torch.preserve_format)
    check(aten._to_copy.default, torch.empty(0, 3), dtype=i64)
    check(aten._to_copy.default, T(2.7), dtype=i64)


CASES = [
    (aten.clone.default, (X,), {}),
    (aten.copy.default, (INTS, T(3.7)), {}),
    (aten.copy.default, (X, INTS[:5]), {}),
    (aten.fill.Scalar, (INTS, 2.7), {}),
    (aten.fill.Scalar, (X, nan), {}),
    (aten.fill.Scalar, (BOOLS, 2), {}),
    (aten.fill.Tensor, (INTS.to(u8), T(-1.5)), {}),
    (aten.zero.default, (X,), {}),
    (aten.full_like.default, (X, 2), {}),
    (aten.full_like.default, (INTS, 2.7), {}),
    (aten.full_like.default, (X, True), {"dtype": torch.bool}),
    (aten.full_like.default, (T(1.0), 2.5), {"dtype": bf16}),
    (aten.zeros_like.default, (X,), {"dtype": i64}),
    (aten.ones_like.default, (BOOLS,), {}),
    (aten.ones_like.default, (INTS,), {"dtype": torch.complex64}),
    (aten.new_full.default, (X, [2, 3], 7), {}),
    (aten.new_full.default, (INTS, [], 2.5), {"dtype": f64}),
    (aten.new_zeros.default, (X, [0, 2]), {}),
    (aten.new_ones.default, (BOOLS, [2]), {"dtype": torch.float32}),
    (aten._conj_physical.default, (COMPLEX,), {}),
    (torch.ops.prims.conj_physical.default, (COMPLEX,), {}),
    (aten._conj.default, (COMPLEX,), {}),
    (aten._conj_copy.default, (COMPLEX,), {}),
    (aten._neg_view_copy.default, (X,), {}),
    (aten.complex.default, (X, Y), {}),
    (aten.complex.default, (X.double(), T(2.0, dtype=f64)), {}),
    (aten.polar.default, (X.abs(), Y), {}),
    (aten.view_as_real.default, (COMPLEX,), {}),
    (aten.view_as_real.default, (T(1 + 2j),), {}),
    (aten.view_as_complex.default, (torch.stack([X, Y], -1),), {}),
    (aten.angle.default, (torch.cat([COMPLEX, T([0j, -1, -1j])]),), {}),
]


@pytest.mark.parametrize("op,args,kwargs", CASES)
@together
def test_fill_and_factories(op: torch._ops.OpOverload, args: tuple, kwargs: dict) -> None:
    check(op, *args, **kwargs)


@pytest.mark.parametrize(
    "op,args", [(aten.fill.Scalar, (INTS, 2.7)), (aten.full_like.default, (X, 2.5)), (aten.full_like.default, (INTS, 7))]
)
@together
def test_numbers_as_inputs(op: torch._ops.OpOverload, args: tuple) -> None:
    check_lifted(op, args, {})


@pytest.mark.parametrize("op,args", [(aten.empty_like, ()), (aten.new_empty, ([3, 2],)), (aten.new_empty_strided, ([3, 2], [1, 3]))])
def test_uninitialised_factories_have_shape_and_dtype(op: object, args: tuple) -> None:
    expected = op.default(X, *args, dtype=bf16)
    with _compat.enable_x64():
        got = to_torch(lowerings.lookup(op.default).fn(to_jax(X), *args, dtype=bf16))
    assert (got.shape, got.dtype) == (expected.shape, expected.dtype)


@together
def test_gradients() -> None:
    check_gradient(aten._to_copy.default, X, dtype=f64)
    check_gradient(aten.fill.Tensor, X, T(2.0))


def test_complex_gradients() -> None:
    """Through complex and back: real inputs, real loss."""
    x, y = X.clone().requires_grad_(), Y.clone().requires_grad_()
    ((torch.complex(x, y) * (1 + 2j)).abs() * 2).sum().backward()
    fn = {
        name: lowerings.lookup(op).fn
        for name, op in (("complex", aten.complex.default), ("mul", aten.mul.Tensor), ("abs", aten.abs.default))
    }
    with _compat.enable_x64():
        grads = jax.grad(lambda a, b: (fn["abs"](fn["mul"](fn["complex"](a, b), 1 + 2j)) * 2).sum(), (0, 1))(to_jax(X), to_jax(Y))
    torch.testing.assert_close([to_torch(g) for g in grads], [x.grad, y.grad])
