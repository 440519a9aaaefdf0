"""Functions of one tensor against eager torch: special values, integers, half precision, complex, gradients."""

from __future__ import annotations

import pytest
import torch

from tests.torch_bridge.lowerings.batches import together
from tests.torch_bridge.lowerings.gradients import check_gradient
from tests.torch_bridge.lowerings.parity import check
from tests.torch_bridge.lowerings.test_arithmetic import COMPLEX, INTS, T, X, bf16, inf, nan, u8

aten = torch.ops.aten
SPECIAL = T([0.0, -0.0, 1.0, -1.0, inf, -inf, nan, 0.5, -0.5, 2.0, 30.0, -30.0])
# fmt: off
FLOAT_OPS = [
    "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sqrt", "rsqrt", "reciprocal", "sigmoid", "sin", "cos", "tan", "asin",
    "acos", "atan", "sinh", "cosh", "tanh", "asinh", "acosh", "atanh", "erf", "erfc", "erfinv", "i0", "lgamma", "digamma", "deg2rad",
    "rad2deg", "angle",
]
# fmt: on
REAL_ONLY = {"i0", "erf", "erfc", "erfinv", "lgamma", "digamma", "deg2rad", "rad2deg"}


@pytest.mark.core(keep=12)
@pytest.mark.parametrize("name", FLOAT_OPS)
@together
def test_float_functions(name: str) -> None:
    op = getattr(aten, name).default
    x = torch.cat([X.flatten(), SPECIAL])
    check(op, x, rtol=3e-6, atol=1e-6)
    check(op, x.to(bf16), jit=False)
    check(op, x.double(), jit=False)
    check(op, INTS, jit=False, rtol=3e-6, atol=1e-6)
    check(op, T([True, False]), jit=False)
    check(op, T(0.25), jit=False)
    check(op, torch.empty(0, 2), jit=False)
    if name not in REAL_ONLY:
        check(op, COMPLEX, jit=False, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["sqrt", "acos", "asin", "acosh", "log", "atanh"])
@together
def test_branch_cuts_have_two_sides(name: str) -> None:
    """The sign of a zero says on which side of the cut a complex number lies: that of `z.conj()` is the other one."""
    above = T([complex(-2, 0.0), complex(2, 0.0), complex(-0.5, 0.0), complex(0.5, 0.0)])
    check(getattr(aten, name).default, torch.cat([above, above.conj().resolve_conj()]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["log", "log2", "log10"])
@together
def test_the_logarithm_of_a_complex_zero(name: str) -> None:
    check(getattr(aten, name).default, T([0j, 1j, 100 + 0j]))


@pytest.mark.parametrize("name", FLOAT_OPS)
@together
def test_float_function_gradients(name: str) -> None:
    x = T([0.1, 0.3, 0.5, 0.7, 0.9])
    check_gradient(getattr(aten, name).default, x + 1 if name == "acosh" else x, rtol=1e-5, atol=1e-5)


@together
def test_whole_powers_have_whole_logarithms() -> None:
    check(aten.log2.default, T([2.0**n for n in range(-100, 100)]), rtol=0, atol=0)
    check(aten.log10.default, T([10.0**n for n in range(11)]), rtol=0, atol=0)
    check(aten.exp2.default, torch.arange(-100.0, 100.0), rtol=0, atol=0)
    check_gradient(aten.log2.default, T([0.25, 0.5, 1.0, 3.0]))


ROUNDED = T([0.5, 1.5, 2.5, -0.5, -1.5, 1.7, -1.7, 0.0, inf, -inf, nan, 1e10])


@pytest.mark.parametrize("name", ["neg", "abs", "floor", "ceil", "trunc", "round", "sign", "sgn", "frac"])
@together
def test_rounding_and_signs(name: str) -> None:
    op = getattr(aten, name).default
    check(op, ROUNDED)
    check(op, ROUNDED.to(bf16))
    check(op, T(-1.5))
    if name != "frac":
        check(op, INTS)
        check(op, T([-128, 5], dtype=torch.int8))
        check(op, T([0, 255, 3], dtype=u8))
    if name in ("neg", "abs", "sgn"):
        check(op, torch.cat([COMPLEX, T([0j])]))


@together
def test_round_decimals() -> None:
    for decimals in (0, 1, 2, 3, -1, -2):
        check(aten.round.decimals, X * 1234.5, decimals=decimals)
    check(aten.round.decimals, X.to(bf16) * 100, decimals=1)
    check(aten.round.decimals, X.double() * 100, decimals=2)


@together
def test_frexp() -> None:
    check(aten.frexp.Tensor, T([0.0, 1.0, -3.0, inf, nan, 1e-30, -1e30, 0.75]))
    check(aten.frexp.Tensor, X.double())


@pytest.mark.parametrize(
    "op,x",
    [
        (aten.abs.default, T([0.0, -1.0, 2.0])),
        (aten.sign.default, X),
        (aten.floor.default, X),
        (aten.round.default, X),
        (aten.frac.default, X),
        (aten.neg.default, X),
        (aten.sqrt.default, T([0.0, 4.0])),
        (aten.angle.default, X),
        (aten.sigmoid.default, T([-200.0, 0.0, 200.0])),
        (aten.tanh.default, T([-200.0, 0.0, 200.0])),
    ],
)
@together
def test_gradient(op: torch._ops.OpOverload, x: torch.Tensor) -> None:
    check_gradient(op, x)
