"""Clamps, maxima, `where`, two-argument functions, comparisons, logic and bits against eager torch."""

from __future__ import annotations

import pytest
import torch

from tests.torch_bridge.lowerings.batches import together
from tests.torch_bridge.lowerings.gradients import check_gradient
from tests.torch_bridge.lowerings.parity import check
from tests.torch_bridge.lowerings.test_arithmetic import (
    BOOLS,
    BOOLS2,
    COMPLEX,
    HALF,
    HALF2,
    INTS,
    INTS2,
    PAIRS,
    T,
    X,
    Y,
    bf16,
    check_lifted,
    f64,
    i32,
    i64,
    inf,
    nan,
    rand,
    u8,
)

aten = torch.ops.aten
EDGE = T([1.0, nan, inf, -inf, 0.0, -0.0, 2.0, -3.0, 1e30, -1e-30])
EDGE2 = T([1.0, 2.0, nan, inf, -0.0, 0.0, nan, -inf, 1e30, 1e-30])
REAL_PAIRS = [p for p in PAIRS if not p[0].is_complex()]

CASES = [
    (aten.clamp.default, (X, -0.5, 0.5)),
    (aten.clamp.default, (X, None, 0.5)),
    (aten.clamp.default, (X, -0.5)),
    (aten.clamp.default, (EDGE, 2.0, 1.0)),
    (aten.clamp.default, (EDGE, nan, 1.0)),
    (aten.clamp.default, (INTS, -2, 2.5)),
    (aten.clamp.default, (INTS, -2, 2)),
    (aten.clamp.default, (BOOLS, 0, 3)),
    (aten.clamp.default, (HALF, -0.1, 0.7)),
    (aten.clamp.Tensor, (EDGE, EDGE2, T(1.0))),
    (aten.clamp.Tensor, (X, None, Y)),
    (aten.clamp.Tensor, (X, rand(5), Y)),
    (aten.clamp.Tensor, (INTS, T(-0.5), T(2))),
    (aten.clamp_min.default, (INTS, 2.5)),
    (aten.clamp_min.default, (BOOLS, 1)),
    (aten.clamp_min.Tensor, (EDGE, EDGE2)),
    (aten.clamp_max.default, (X, 0)),
    (aten.clamp_max.Tensor, (INTS, T(2.5))),
    (aten.fmax.default, (EDGE, EDGE2)),
    (aten.fmin.default, (EDGE, EDGE2)),
    (aten.maximum.default, (EDGE, EDGE2)),
    (aten.minimum.default, (EDGE, EDGE2)),
    (aten.maximum.default, (BOOLS, BOOLS2)),
    (aten.where.self, (X > 0, X, Y)),
    (aten.where.self, (X > 0, X, T(2, dtype=i64))),
    (aten.where.self, (BOOLS, T([1, 2, 3, 4]), T(0.5))),
    (aten.where.self, (T(True), HALF, T(0.1))),
    (aten.where.self, (rand(3, 1) > 0, rand(4), T(1j))),
    (aten.xlogy.Tensor, (EDGE.abs(), EDGE2.abs())),
    (aten.xlogy.Tensor, (T([0.0, 0.0, 0.0, 1.0, 2.0]), T([nan, 0.0, -1.0, 0.0, inf]))),
    (aten.xlogy.Tensor, (T([0.0, 0.0]), T([inf, 3.0]))),
    (aten.xlogy.Tensor, (INTS, T([1, 2, 3, 4, 5, 6]))),
    (aten.xlogy.Scalar_Self, (2, X.abs())),
    (aten.xlogy.Scalar_Other, (X, 0.5)),
    (aten.xlogy.Scalar_Other, (HALF, 0.1)),
    (aten.atan2.default, (EDGE, EDGE2)),
    (aten.atan2.default, (INTS, INTS2)),
    (aten.atan2.default, (HALF, HALF2)),
    (aten.atan2.default, (HALF, T(0.1))),
    (aten.hypot.default, (EDGE, EDGE2)),
    (aten.hypot.default, (T([3.0, 0.0, 1e30]), T([4.0, 0.0, 1e30]))),
    (aten.hypot.default, (HALF, T(0.1))),
    (aten.copysign.Tensor, (EDGE, EDGE2)),
    (aten.copysign.Tensor, (INTS, T([-0.0, 1.0, -1.0, 0.0, nan, -2.0]))),
    (aten.copysign.Tensor, (INTS, INTS2)),
    (aten.copysign.Scalar, (X, -1)),
    (aten.nextafter.default, (EDGE[:3], EDGE2[:3])),
    (aten.nextafter.default, (X, Y)),
    (aten.nextafter.default, (X.double(), Y.double())),
    (aten.nextafter.default, (HALF, HALF2)),
    (aten.logaddexp.default, (EDGE, EDGE2)),
    (aten.logaddexp.default, (T([-inf, inf, inf]), T([-inf, inf, -inf]))),
    (aten.logaddexp.default, (HALF, HALF2)),
    (aten.logaddexp2.default, (EDGE, EDGE2)),
    (aten.heaviside.default, (EDGE, T(0.5))),
    (aten.heaviside.default, (INTS, INTS2)),
    (aten.gcd.default, (T([-12, 0, 5, 18, -7]), T([18, 0, 0, -12, 21]))),
    (aten.gcd.default, (T([12, 18], dtype=i32), T(8))),
    (aten.gcd.default, (T([12, 18], dtype=u8), T([8, 27], dtype=u8))),
    *((op.default, (T([0, -128, 127, -6, 5], dtype=torch.int8), T([[-128], [4], [-1]], dtype=torch.int8))) for op in (aten.gcd, aten.lcm)),
    (aten.gcd.default, (T([-(2**63), 12, 0]), T([[-(2**63)], [18], [7]]))),
    (aten.lcm.default, (T([-4, 0, 3, 6]), T([6, 3, 0, -4]))),
    (aten.nan_to_num.default, (EDGE,)),
    (aten.nan_to_num.default, (EDGE, 1.0, 2.0, -3.0)),
    (aten.nan_to_num.default, (EDGE.half(),)),
    (aten.nan_to_num.default, (EDGE.to(bf16), 0.1)),
    (aten.nan_to_num.default, (INTS, 1.0)),
    (aten.nan_to_num.default, (torch.complex(EDGE, EDGE2), 0.5)),
]


@pytest.mark.core(keep=33)
@pytest.mark.parametrize("op,args", CASES)
@together
def test_pointwise(op: torch._ops.OpOverload, args: tuple) -> None:
    check(op, *args)


@pytest.mark.core(keep=30)
@pytest.mark.parametrize("op", [aten.maximum.default, aten.minimum.default, aten.fmax.default, aten.fmin.default], ids=str)
@pytest.mark.parametrize("a,b", REAL_PAIRS)
def test_maxima_promote(op: torch._ops.OpOverload, a: torch.Tensor, b: torch.Tensor) -> None:
    check(op, a, b, jit=False)


COMPARED = [*REAL_PAIRS, (EDGE, EDGE2), (BOOLS, BOOLS2), (T([16777217]), T([16777216.0])), (X, X.clone()), (HALF, T(0.7).to(f64))]


@pytest.mark.parametrize("name", ["eq", "ne", "lt", "le", "gt", "ge"])
@together
def test_comparisons(name: str) -> None:
    op = getattr(aten, name)
    for a, b in COMPARED:
        check(op.Tensor, a, b, jit=False)
    check(op.Tensor, HALF, HALF2)
    for x, number in (
        (X, 0.3),
        (INTS, 2),
        (INTS, 2.5),
        (BOOLS, True),
        (BOOLS, 1),
        (HALF, 0.7),
        (T(3), 3.0),
        (T([16777217]), 16777216.0),
        (EDGE, inf),
    ):
        check(op.Scalar, x, number, jit=x is HALF)
    if name in ("eq", "ne"):
        check(op.Tensor, COMPLEX, COMPLEX.flip(0))
        check(op.Scalar, T([1 + 0j, 2]), 1)
        check(op.Tensor, COMPLEX, T(1.0))


@pytest.mark.parametrize(
    "x", [EDGE, INTS, BOOLS, COMPLEX, HALF, torch.empty(0), T(nan), T(3), INTS.to(u8), T([complex(nan, 1), complex(1, -inf)])]
)
@together
def test_predicates(x: torch.Tensor) -> None:
    for op in (
        aten.isnan,
        aten.isinf,
        aten.logical_not,
        *(() if x.is_complex() else (aten.isposinf, aten.isneginf, aten.signbit, aten.sign, aten.sgn)),
    ):
        check(op.default, x, jit=False)
    if x.is_complex():
        check(aten.sgn.default, x)


def test_logic() -> None:
    for op in (aten.logical_and.default, aten.logical_or.default, aten.logical_xor.default):
        for a, b in ((BOOLS, BOOLS2), (EDGE, EDGE2), (INTS, T(0.0)), (COMPLEX, T(0j)), (T([0, 1], dtype=u8), T([[True], [False]]))):
            check(op, a, b, jit=False)


@together
def test_bits() -> None:
    for name in ("and", "or", "xor"):
        op = getattr(aten, f"bitwise_{name}")
        for a, b in ((INTS, INTS2), (BOOLS, BOOLS2), (INTS, T(True)), (INTS.to(u8), INTS2.to(torch.int8)), (T(5, dtype=i32), INTS)):
            check(op.Tensor, a, b, jit=False)
        check(op.Scalar, INTS, 6)
        check(op.Scalar, BOOLS, 2)
        check(op.Scalar_Tensor, 6, INTS)
    for x in (INTS, BOOLS, INTS.to(u8)):
        check(aten.bitwise_not.default, x)


SHIFTED = [
    (T([1, -1, -8, 5, 3]), T([63, 64, -1, 2, 0])),
    (T([8, 255], dtype=u8), T([9, 1], dtype=u8)),
    (T([-8, 100], dtype=torch.int8), T([9, 1], dtype=torch.int8)),
    (T([-8, 100], dtype=i32), T(40)),
]


@pytest.mark.parametrize("a,b", SHIFTED)
@together
def test_shifts(a: torch.Tensor, b: torch.Tensor) -> None:
    for op in (aten.bitwise_left_shift, aten.bitwise_right_shift, aten.__lshift__, aten.__rshift__):
        check(op.Tensor, a, b)


@together
def test_shifts_of_numbers() -> None:
    for op in (aten.bitwise_left_shift, aten.bitwise_right_shift):
        check(op.Tensor_Scalar, INTS, 2)
        check(op.Scalar_Tensor, -20, T([1, 2]))
    check(aten.__lshift__.Scalar, INTS, 2)
    check(aten.__rshift__.Scalar, INTS, 2)


LIFTED = [
    (aten.clamp.default, (X, -0.5, 0.5)),
    (aten.clamp.default, (INTS, -2, 2.5)),
    (aten.clamp_min.default, (HALF, 0.1)),
    (aten.ge.Scalar, (HALF, 0.7)),
    (aten.eq.Scalar, (INTS, 2)),
    (aten.bitwise_and.Scalar, (INTS, 6)),
    (aten.xlogy.Scalar_Self, (2, X.abs())),
    (aten.copysign.Scalar, (X, -1)),
]


@pytest.mark.parametrize("op,args", LIFTED)
@together
def test_numbers_as_inputs(op: torch._ops.OpOverload, args: tuple) -> None:
    check_lifted(op, args, {})


TIED = T([1.0, 2.0, 2.0, -1.0])
GRADIENTS = [
    (aten.clamp.default, (T([-1.0, -0.5, 0.0, 0.5, 1.0]), -0.5, 0.5)),
    (aten.clamp.Tensor, (T([-1.0, -0.5, 0.0, 0.5, 1.0]), T([-0.5] * 5), T([0.5, 0.5, 0.5, 0.5, -1.0]))),
    (aten.clamp_min.default, (TIED, 2.0)),
    (aten.clamp_max.Tensor, (TIED, TIED.flip(0))),
    (aten.maximum.default, (TIED, TIED.flip(0))),
    (aten.fmax.default, (TIED, TIED.flip(0))),
    (aten.fmin.default, (TIED, TIED.flip(0))),
    (aten.where.self, (X > 0, X, Y)),
    (aten.xlogy.Tensor, (T([0.0, 0.0, 1.0, 2.0]), T([2.0, 0.5, 3.0, 1.0]))),
    (aten.atan2.default, (X, Y)),
    (aten.hypot.default, (X, Y)),
    (aten.logaddexp.default, (TIED, TIED.flip(0))),
    (aten.logaddexp2.default, (X, Y)),
    (aten.nan_to_num.default, (EDGE,)),
    (aten.copysign.Tensor, (X, Y)),
]


@pytest.mark.parametrize("op,args", GRADIENTS)
@together
def test_gradient(op: torch._ops.OpOverload, args: tuple) -> None:
    check_gradient(op, *args)
