"""Arithmetic lowerings against eager torch: promotion, rounding modes, integer and half-precision rules, gradients."""

from __future__ import annotations

import jax
import pytest
import torch

import torch_bridge.lowerings as lowerings
from tests.torch_bridge.lowerings.batches import together, verify
from tests.torch_bridge.lowerings.gradients import check_gradient
from tests.torch_bridge.lowerings.parity import check, to_jax, to_torch
from torch_bridge import _compat
from torch_bridge.ir import dtypes

aten = torch.ops.aten
inf, nan = float("inf"), float("nan")
bf16, f16, f64, i32, i64, u8 = torch.bfloat16, torch.float16, torch.float64, torch.int32, torch.int64, torch.uint8
T = torch.tensor
gen = torch.Generator().manual_seed(0)


def rand(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=gen).to(dtype)


def ints(*shape: int, dtype: torch.dtype = i64, low: int = -9, high: int = 10) -> torch.Tensor:
    return torch.randint(low, high, shape, generator=gen).to(dtype)


X, Y = rand(4, 5), rand(4, 5)
# A multiple of 32: in the tail of a vector loop torch rounds some half-precision ops at every step.
HALF = rand(512, dtype=bf16)
HALF2 = rand(512, dtype=bf16)
EDGE = T([7.0, -7.0, 1.0, 0.0, inf, -1.0, 5.0, nan, -0.0, 2.5])
EDGE2 = T([2.0, 2.0, inf, 0.0, 2.0, inf, -0.0, 1.0, 3.0, nan])
INTS = T([7, -7, 7, -7, 0, 5])
INTS2 = T([2, 2, -2, -2, 3, 5])
BOOLS, BOOLS2 = T([True, True, False, False]), T([True, False, True, False])
COMPLEX = torch.complex(rand(6), rand(6))

PAIRS = [  # operands whose dtypes promote in every way that matters
    (X, Y),
    (X, rand(5)),
    (X, rand(4, 1)),
    (X, T(2.5)),
    (X, T(2.5, dtype=f64)),
    (X, T(3)),
    (X, ints(5)),
    (INTS, T(2.5)),
    (INTS, T(3, dtype=i32)),
    (INTS, INTS2.to(i32)),
    (INTS.to(u8), INTS2.to(torch.int8)),
    (X, Y.double()),
    (T(1.5), T(2)),
    (T(1.5, dtype=bf16), T(2.25)),
    (HALF, HALF2),
    (HALF, HALF2.half()),
    (HALF, HALF2.float()),
    (HALF, T(0.1)),
    (HALF, T(0.1, dtype=f64)),
    (HALF, ints(512, low=1)),
    (rand(50, dtype=f16), rand(50, dtype=f16)),
    (torch.empty(0, 3), rand(3)),
    (COMPLEX, rand(6)),
    (COMPLEX, COMPLEX.flip(0)),
    (COMPLEX, T(2)),
]
NUMBERS = [
    (X, 2.5),
    (X, 2),
    (INTS, 3),
    (INTS, 2.5),
    (HALF, 0.1),
    (HALF, 3),
    (X.double(), 0.1),
    (COMPLEX, 2.0),
    (COMPLEX, 1 + 2j),
    (T(3), 0.5),
    (T(2.0, dtype=bf16), 0.1),
]


@pytest.mark.core(keep=60)
@pytest.mark.parametrize("op", [aten.add.Tensor, aten.sub.Tensor, aten.rsub.Tensor, aten.mul.Tensor, aten.div.Tensor], ids=str)
@pytest.mark.parametrize("a,b", PAIRS + NUMBERS)
@together
def test_basic(op: torch._ops.OpOverload, a: torch.Tensor, b: object) -> None:
    if op is aten.rsub.Tensor and not isinstance(b, torch.Tensor):
        op = aten.rsub.Scalar
    check(op, a, b)


ONE_LINE = [
    (aten.add.Tensor, (X, Y), {"alpha": 2}),
    (aten.add.Tensor, (X, Y), {"alpha": 0.3}),
    (aten.add.Tensor, (HALF, HALF2), {"alpha": 0.1}),
    (aten.sub.Tensor, (HALF, HALF2), {"alpha": 0.3}),
    (aten.add.Tensor, (INTS, INTS2), {"alpha": -3}),
    (aten.add.Scalar, (X, 2.5, 0.5), {}),
    (aten.sub.Scalar, (INTS, 2, 3), {}),
    (aten.rsub.Scalar, (HALF, 0.1, 0.3), {}),
    (aten.rsub.Tensor, (X, Y), {"alpha": 2}),
    (aten.add.Tensor, (BOOLS, BOOLS2), {}),
    (aten.add.Tensor, (BOOLS, True), {}),
    (aten.add.Tensor, (BOOLS, 2), {}),
    (aten.add.Tensor, (COMPLEX, COMPLEX), {"alpha": 1j}),
    (aten.mul.Tensor, (BOOLS, BOOLS2), {}),
    (aten.mul.Tensor, (BOOLS, 0.5), {}),
    (aten.mul.Scalar, (HALF, 0.1), {}),
    (aten.mul.Tensor, (T(0.1), HALF), {}),
    (aten.div.Tensor, (BOOLS, T([True])), {}),
    (aten.div.Scalar, (HALF, 0.1), {}),
    (aten.div.Tensor, (EDGE, EDGE2), {}),
    (aten._add_relu.Tensor, (X, Y), {"alpha": 2}),
    (aten.add.Tensor, (T([2**62, -(2**63)]), T([2**62, -1])), {}),
    (aten.mul.Tensor, (T([200, 3], dtype=u8), T([2, 100], dtype=u8)), {}),
    (aten.ldexp.Tensor, (X, T([1, -2, 3, 0, 5])), {}),
    (aten.ldexp.Tensor, (T([2.0**-120, 2.0**100, 1.5, float("inf"), float("nan"), 0.0]), T([200, -210, 1 << 30, -3, 2, 5])), {}),
    (aten.ldexp.Tensor, (T([2.0**-1000, -(2.0**1000), 3.0], dtype=torch.float64), T([1900, -2000, 10], dtype=torch.int32)), {}),
    (aten.ldexp.Tensor, (HALF, T(3)), {}),
    (aten.ldexp.Tensor, (HALF.to(bf16), T(-3, dtype=torch.int8)), {}),
    (aten.ldexp.Tensor, (INTS, T(2, dtype=bf16)), {}),
    (aten.ldexp.Tensor, (INTS, T(2, dtype=torch.float16)), {}),
    (aten.pow.Tensor_Scalar, (BOOLS, True), {}),
    (aten.pow.Tensor_Scalar, (BOOLS, False), {}),
    (aten.masked_fill.Scalar, (BOOLS, BOOLS2, 1j), {}),
    (aten.masked_fill.Scalar, (INTS, INTS > 0, 3 + 0j), {}),
    (aten.addcmul.default, (X, Y, rand(5)), {}),
    (aten.addcmul.default, (X, Y, rand(5)), {"value": 0.3}),
    (aten.addcmul.default, (HALF, HALF2, HALF2), {"value": 0.1}),
    (aten.addcmul.default, (INTS, INTS2, INTS2), {"value": 2}),
    (aten.addcmul.default, (COMPLEX, COMPLEX, COMPLEX), {"value": 1j}),
    (aten.addcdiv.default, (X, Y, rand(5)), {"value": 0.3}),
    (aten.addcdiv.default, (HALF, HALF2, HALF2.abs() + 1), {"value": 0.1}),
    (aten.lerp.Scalar, (X, Y, 0.3), {}),
    (aten.lerp.Scalar, (X, Y, 0.7), {}),
    (aten.lerp.Scalar, (X, Y, 2), {}),
    (aten.lerp.Scalar, (HALF, HALF2, 0.7), {}),
    (aten.lerp.Tensor, (X, Y, rand(4, 5)), {}),
    (aten.lerp.Tensor, (HALF, HALF2, HALF2.flip(0)), {}),
    (aten.lerp.Tensor, (X, Y, T(0.25)), {}),
    (aten.lerp.Scalar, (COMPLEX, COMPLEX.flip(0), 0.3), {}),
]


@pytest.mark.parametrize("op,args,kwargs", ONE_LINE)
@together
def test_arithmetic(op: torch._ops.OpOverload, args: tuple, kwargs: dict) -> None:
    check(op, *args, **kwargs)


DIVIDED = [
    (EDGE, EDGE2),
    (INTS, INTS2),
    (INTS, 3),
    (INTS, -3),
    (X, 0.3),
    (X, Y),
    (INTS, 2.5),
    (INTS.to(u8), T([3], dtype=u8)),
    (T(-7), T(2)),
    (X.double(), Y.double()),
]
DIVIDED += [
    (X, ints(5, low=1)),
    (torch.empty(0), torch.empty(0)),
    (HALF, HALF2),
    (rand(50, dtype=f16), rand(50, dtype=f16)),
    (INTS.to(torch.int8), 2),
]


@pytest.mark.parametrize("a,b", [*DIVIDED, (HALF, 0.1)])
@pytest.mark.parametrize("mode", ["floor", "trunc", None])
@together
def test_division_modes(a: torch.Tensor, b: object, mode: str | None) -> None:
    check(aten.div.Tensor_mode, a, b, rounding_mode=mode)


@pytest.mark.parametrize("a,b", DIVIDED)
@pytest.mark.parametrize("op", [aten.floor_divide.default, aten.remainder.Tensor, aten.fmod.Tensor], ids=str)
@together
def test_modulo(op: torch._ops.OpOverload, a: torch.Tensor, b: object) -> None:
    scalar = {
        aten.remainder.Tensor: aten.remainder.Scalar,
        aten.fmod.Tensor: aten.fmod.Scalar,
        aten.floor_divide.default: aten.floor_divide.Scalar,
    }
    check(op if isinstance(b, torch.Tensor) else scalar[op], a, b)


@together
def test_modulo_of_numbers() -> None:
    check(aten.remainder.Scalar_Tensor, -7, INTS2)
    check(aten.remainder.Scalar_Tensor, -7.5, X)
    check(aten.remainder.Scalar, HALF, 0.3)
    check(aten.fmod.Scalar, HALF, 0.3)
    check(aten.floor_divide.Scalar, INTS, 3)
    check(aten.div.Scalar_mode, INTS, 3, rounding_mode="trunc")


POSITIVE = rand(50).abs() + 0.1
POWERS = [
    *((POSITIVE, e) for e in (0, 1, 2, 3, 4, 7, -1, -2, -3, 0.5, -0.5, 1.7, 10, True)),
    *((EDGE, e) for e in (0, 1, 2, 3, -1, -2, 0.5, 1.5, 4, -3)),
    *((POSITIVE.to(bf16), e) for e in (0, 1, 2, 3, -1, -2, 0.5, -0.5, 0.1, 4)),
    *((INTS, e) for e in (0, 1, 2, 5, 63, 67, 2.0, 0.5, -1.0)),
    *((COMPLEX, e) for e in (0, 1, 2, 3, -1, 0.5, 1.3, 1 + 1j)),
    (BOOLS, 2),
    (INTS.to(u8), 3),
    (X, 2 + 0j),
    (torch.empty(0), 2),
]


@pytest.mark.core(keep=20)
@pytest.mark.parametrize("x,e", POWERS)
@together
def test_pow_by_number(x: torch.Tensor, e: float) -> None:
    check(aten.pow.Tensor_Scalar, x, e)


@together
def test_pow_by_tensor() -> None:
    check(aten.pow.Tensor_Tensor, POSITIVE, torch.randn(50))
    check(aten.pow.Tensor_Tensor, POSITIVE.to(bf16), torch.randn(50).to(bf16))
    check(aten.pow.Tensor_Tensor, EDGE, EDGE2)
    check(aten.pow.Tensor_Tensor, T([2, 3, -1, 1, 0, -3, -1]), T([-1, 67, -3, -5, 0, 41, 2**40]))
    check(aten.pow.Tensor_Tensor, T([2, 250], dtype=u8), T([7, 3], dtype=u8))
    check(aten.pow.Tensor_Tensor, T([2, -3], dtype=i32), T([31, 40]))
    check(aten.pow.Tensor_Tensor, COMPLEX, COMPLEX.flip(0), rtol=1e-5, atol=1e-5)
    check(aten.pow.Tensor_Tensor, torch.zeros(7, dtype=torch.complex128), T([0, 2, 0.5, -1, 1j, 1 + 1j, -1 - 1j], dtype=torch.complex128))
    check(aten.pow.Scalar, 0, T([0, 2, 0.5, -1, 1j, 1 + 1j, -1 - 1j], dtype=torch.complex64))
    check(aten.pow.Scalar, 2, INTS.abs())
    check(aten.pow.Scalar, 0.3, X)
    check(aten.pow.Scalar, 1, T([nan, 0.0]))
    check(aten.pow.Scalar, 0.1, POSITIVE.to(bf16))
    check(aten.pow.Scalar, 2, T([True, False]))


LIFTED = [
    (aten.add.Tensor, (HALF, 0.1), {}),
    (aten.add.Tensor, (X, Y), {"alpha": 0.3}),
    (aten.add.Tensor, (INTS, 3), {}),
    (aten.add.Tensor, (INTS, 2.5), {}),
    (aten.mul.Tensor, (HALF, 0.1), {}),
    (aten.div.Tensor, (INTS, 3), {}),
    (aten.div.Tensor_mode, (INTS, -3), {"rounding_mode": "floor"}),
    (aten.remainder.Scalar, (X, 0.3), {}),
    (aten.pow.Scalar, (0.3, X), {}),
    (aten.addcmul.default, (HALF, HALF2, HALF2), {"value": 0.1}),
    (aten.addcdiv.default, (X, Y, Y), {"value": 2}),
    (aten.lerp.Scalar, (X, Y, 0.7), {}),
    (aten.rsub.Scalar, (HALF, 0.1, 0.3), {}),
]


def check_lifted(op: torch._ops.OpOverload, args: tuple, kwargs: dict, **tolerance: float) -> None:
    """The op with every Python number as a traced `dtypes.Scalar`."""
    expected = op(*args, **kwargs)
    fn = lowerings.lookup(op).fn

    def is_lifted(x: object) -> bool:
        return isinstance(x, (int, float)) and not isinstance(x, bool)

    numbers = [x for x in (*args, *kwargs.values()) if is_lifted(x)]
    with _compat.enable_x64():
        inputs = [to_jax(x) for x in args if isinstance(x, torch.Tensor)], [jax.numpy.asarray(n) for n in numbers]

    def call(given: tuple[list, list]) -> object:
        tensors, values = list(given[0]), [dtypes.Scalar(type(n), v) for n, v in zip(numbers, given[1], strict=True)]

        def fill(x: object) -> object:
            return values.pop(0) if is_lifted(x) else tensors.pop(0) if isinstance(x, torch.Tensor) else x

        return fn(*[fill(x) for x in args], **{k: fill(v) for k, v in kwargs.items()})

    def compare(got: object) -> None:
        torch.testing.assert_close(to_torch(got), expected, **tolerance)

    verify((check_lifted, op, args, kwargs), jax.jit(call), inputs, compare)


@pytest.mark.parametrize("op,args,kwargs", LIFTED)
@together
def test_numbers_as_inputs(op: torch._ops.OpOverload, args: tuple, kwargs: dict) -> None:
    check_lifted(op, args, kwargs)


@pytest.mark.parametrize(
    "op,args",
    [
        (aten.add.Tensor, (HALF, 0.1)),
        (aten.mul.Tensor, (HALF, 0.1)),
        (aten.div.Tensor, (HALF, HALF2)),
        (aten.addcmul.default, (HALF, HALF2, HALF2)),
    ],
)
@together
def test_half_precision_is_bit_exact(op: torch._ops.OpOverload, args: tuple) -> None:
    check(op, *args, rtol=0, atol=0)
    check_lifted(op, args, {}, rtol=0, atol=0)


GRADIENTS = [
    (aten.add.Tensor, (X, rand(5))),
    (aten.mul.Tensor, (X, Y)),
    (aten.div.Tensor, (X, Y)),
    (aten.div.Tensor_mode, (X, Y, "floor")),
    (aten.div.Tensor_mode, (X, Y, "trunc")),
    (aten.remainder.Tensor, (X, Y)),
    (aten.fmod.Tensor, (X, Y)),
    (aten.pow.Tensor_Scalar, (T([0.0, 1.0, -2.0]), 2)),
    (aten.pow.Tensor_Scalar, (T([0.0, 1.0, -2.0]), 3)),
    (aten.pow.Tensor_Scalar, (T([0.0, 1.0, -2.0]), 0)),
    (aten.pow.Tensor_Scalar, (T([0.0, 1.0, -2.0]), 4)),
    (aten.pow.Tensor_Scalar, (T([0.5, 1.0, 2.0]), -2)),
    (aten.pow.Tensor_Scalar, (T([0.5, 1.0, 2.0]), 1.7)),
    (aten.pow.Tensor_Tensor, (T([0.0, 1.0, 2.0, 0.0]), T([2.0, 0.5, -1.0, 0.0]))),
    (aten.pow.Scalar, (0.3, X)),
    (aten.addcmul.default, (X, Y, rand(5))),
    (aten.addcdiv.default, (X, Y, rand(5))),
    (aten.lerp.Tensor, (X, Y, rand(4, 5))),
    (aten.lerp.Scalar, (X, Y, 0.7)),
]


@pytest.mark.parametrize("op,args", GRADIENTS)
@together
def test_gradient(op: torch._ops.OpOverload, args: tuple) -> None:
    kwargs = {"rounding_mode": args[2]} if op is aten.div.Tensor_mode else {}
    check_gradient(op, *(args[:2] if kwargs else args), **kwargs)


def test_what_a_mask_hides_stays_nan():
    """XLA makes a select of a product with a converted bool; torch multiplies, and inf * 0 is NaN."""
    for dtype in (torch.float32, bf16, f64, torch.complex64):
        x, mask = T([inf, nan, -inf, 2.0]).to(dtype), T([False, False, True, False])
        check(aten.mul.Tensor, x, mask)
        with _compat.enable_x64():
            product = jax.jit(lambda a, m: a * dtypes.cast(m, a.dtype))(to_jax(x), to_jax(mask))
        torch.testing.assert_close(to_torch(product), x * mask.to(dtype), equal_nan=True)
