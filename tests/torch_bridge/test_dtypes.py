"""dtypes.py: promotion against `torch.result_type` over all pairs of dtypes and kinds of operand, and casts against torch's."""

from __future__ import annotations

import itertools
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from torch_bridge import _compat
from torch_bridge.ir import dtypes
from torch_bridge.ir.dtypes import Scalar

REAL = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
]
COMMON = [*REAL, torch.complex64, torch.complex128]
BAREBONES = [torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2]
NUMBERS = [True, 2, 2.5, 2 + 1j]


@pytest.fixture(autouse=True)
def x64():
    with _compat.enable_x64():
        yield


def operand(dtype: torch.dtype, dims: int) -> tuple[torch.Tensor, jax.Array]:
    return torch.ones([1] * dims).to(dtype), jnp.ones([1] * dims, dtypes.to_jax(dtype))


def outcome(fn, *args):
    """The dtype, or RuntimeError where torch has no promotion."""
    try:
        return fn(*args)
    except RuntimeError:
        return RuntimeError


@pytest.mark.parametrize("dtype", [*COMMON, *BAREBONES])
def test_round_trip(dtype):
    assert dtypes.to_torch(dtypes.to_jax(dtype)) == dtype


@pytest.mark.parametrize("dtype", [torch.complex32, torch.qint8])
def test_a_dtype_without_jax_form_is_named(dtype):
    with pytest.raises(TypeError, match=rf"{dtype} has no JAX form.*supported: torch\.bool.*\.to\(torch\.float32\)"):
        dtypes.to_jax(dtype)


@pytest.mark.parametrize("dims", [(1, 1), (1, 0), (0, 1), (0, 0)])
def test_result_dtype_of_two_tensors(dims):
    for a, b in itertools.product([*COMMON, *BAREBONES], repeat=2):
        (ta, ja), (tb, jb) = operand(a, dims[0]), operand(b, dims[1])
        assert outcome(dtypes.result_dtype, ja, jb) == outcome(torch.result_type, ta, tb), (a, b)


@pytest.mark.parametrize("default", [torch.float32, torch.float64])
@pytest.mark.parametrize("dims", [1, 0])
def test_result_dtype_of_tensor_and_number(dims, default):
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        for dtype, number in itertools.product([*COMMON, *BAREBONES], NUMBERS):
            t, j = operand(dtype, dims)
            expected = outcome(torch.result_type, t, number)
            assert outcome(dtypes.result_dtype, j, number) == expected, (dtype, number)
            assert outcome(dtypes.result_dtype, number, j) == expected, (dtype, number)
            assert outcome(dtypes.result_dtype, j, Scalar(type(number), jnp.asarray(number))) == expected, (dtype, number)
    finally:
        torch.set_default_dtype(before)


def test_result_dtype_of_numbers():
    for a, b in itertools.product(NUMBERS, repeat=2):
        assert dtypes.result_dtype(a, b) == torch.result_type(a, b)


def test_result_dtype_of_three_classes():
    """A tensor with dims decides, then 0-d tensors, then numbers; None is no operand."""
    half, zero_d, ints = (operand(d, n)[1] for d, n in ((torch.float16, 1), (torch.float64, 0), (torch.int32, 1)))
    assert dtypes.result_dtype(half, zero_d, 2.5, None) == torch.float16
    assert dtypes.result_dtype(ints, zero_d, 2.5) == torch.float64
    assert dtypes.result_dtype(ints, 2.5) == torch.float32
    assert dtypes.result_dtype(ints, 2) == torch.int32


def test_promote_and_floating():
    ints, halves = operand(torch.int16, 1)[1], operand(torch.bfloat16, 1)[1]
    a, b, c = dtypes.promote(ints, 2, None)
    assert (a.dtype, b.dtype, c) == (jnp.int16, jnp.int16, None)
    assert [x.dtype for x in dtypes.floating(ints, 2)] == [jnp.float32] * 2
    assert [x.dtype for x in dtypes.floating(halves, 2.5)] == [jnp.bfloat16] * 2
    assert [x.dtype for x in dtypes.floating(True)] == [jnp.float32]


VALUES = [0.0, -0.0, 0.5, -0.5, 3.7, -3.7, 127.9, 128.0, 200.5, 255.5, -1.0, -129.0, 300.25, 40000.5, -40000.5, 1e9]
INTEGERS = [0, 1, -1, 127, 128, 255, 256, -129, 65535, 2**31 - 1, 2**31, -(2**31) - 1, 2**40 + 3, 2**63 - 1, -(2**63)]


def cast_like_torch(values, source, target):
    t = torch.tensor(values, dtype=source)
    array = jnp.asarray(t.to(torch.float64 if source.is_floating_point else source).numpy()).astype(dtypes.to_jax(source))
    expected = t.to(target)
    for got in (dtypes.cast(array, dtypes.to_jax(target)), jax.jit(lambda x: dtypes.cast(x, dtypes.to_jax(target)))(array)):
        assert got.dtype == dtypes.to_jax(target)
        wide = torch.complex128 if target.is_complex else torch.float64 if target.is_floating_point else target
        np.testing.assert_array_equal(
            np.asarray(got.astype(dtypes.to_jax(wide))), expected.to(wide).numpy(), err_msg=f"{source} -> {target}"
        )


@pytest.mark.parametrize("source", [torch.float32, torch.float64, torch.bfloat16])
def test_floats_truncate_and_wrap(source):
    for target in (
        torch.int8,
        torch.uint8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.bool,
        torch.float16,
        torch.float64,
        torch.complex64,
    ):
        cast_like_torch(VALUES, source, target)


@pytest.mark.parametrize(
    "source", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.float8_e5m2, torch.int8, torch.int64, torch.bool]
)
@pytest.mark.parametrize("target", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_float8_ends_where_torch_ends_it(source, target):
    """Both sides of the halfway point behind the largest number (464 and 61440), infinities, NaN, and the smallest numbers."""
    numbers = [
        0.0,
        -0.0,
        1.0,
        -2.5,
        240.0,
        448.0,
        449.0,
        464.0,
        465.0,
        -480.0,
        1e4,
        57344.0,
        61439.0,
        61440.0,
        65504.0,
        2.0**-9,
        2.0**-10,
        1.5 * 2.0**-10,
    ]
    if source.is_floating_point:
        values = torch.tensor([*numbers, 1e38, float("inf"), -float("inf"), float("nan")], dtype=torch.float64).to(source)
    else:
        values = torch.tensor([int(max(-128, min(n, 127))) if source is torch.int8 else int(n) for n in numbers]).to(source)
    wide = values.to(torch.float64 if source.is_floating_point else source).numpy()
    got = dtypes.cast(jnp.asarray(wide).astype(dtypes.to_jax(source)), dtypes.to_jax(target))
    assert got.dtype == dtypes.to_jax(target)
    np.testing.assert_array_equal(np.asarray(got.astype(jnp.float32)), values.to(target).float().numpy())


def test_integers_wrap():
    for target in COMMON:
        cast_like_torch(INTEGERS, torch.int64, target)


def test_complex_to_real_keeps_the_real_part():
    x = jnp.asarray([1.5 - 2j, 2j, 0j])
    assert dtypes.cast(x, jnp.float32).tolist() == [1.5, 0.0, 0.0]
    assert dtypes.cast(x, jnp.int32).tolist() == [1, 0, 0]
    assert dtypes.cast(x, jnp.bool_).tolist() == [True, True, False]


@pytest.mark.parametrize(
    ("number", "dtype", "value"),
    [
        (300, jnp.int8, 44),
        (-1, jnp.uint8, 255),
        (2**40, jnp.int32, 0),
        (2**64 - 1, jnp.uint64, 2**64 - 1),
        (True, jnp.int32, 1),
        (2, jnp.bool_, True),
        (2.9, jnp.int64, 2),
        (1 + 2j, jnp.float32, 1.0),
        (2**24 + 1, jnp.float32, 2**24),
    ],
)
def test_cast_of_numbers(number, dtype, value):
    got = dtypes.cast(number, dtype)
    assert got.dtype == dtype and got.item() == value


def test_cast_of_scalars():
    scalar = Scalar(float, jnp.asarray(2.5, jnp.float64))
    assert dtypes.cast(scalar, jnp.float32).item() == 2.5 and dtypes.cast(scalar, jnp.int32).item() == 2
    assert dtypes.is_number(scalar) and dtypes.is_number(1j) and not dtypes.is_number(jnp.ones(()))
    assert repr(scalar) == "Scalar(float)"


def test_halves_round_twice_as_in_torch():
    """float64 goes to float32 first."""
    value = 1 + 2.0**-8 + 2.0**-30
    assert dtypes.cast(value, jnp.bfloat16).item() == torch.tensor(value, dtype=torch.float64).to(torch.bfloat16).item() == 1.0


# -- on the device ---------------------------------------------------------------------------------

KINDS = [torch.bool, torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64]


def _of_kinds(device: str) -> list[object]:
    """Vectors, scalars and empty vectors of each dtype on the device, scalars on the CPU, and Python numbers."""
    made: list[object] = [torch.ones(shape, dtype=d, device=device) for d in KINDS for shape in ((2,), (), (0,))]
    return [*made, *(torch.ones((), dtype=d) for d in (torch.int64, torch.float64)), *NUMBERS]


def test_result_type_on_the_device() -> None:
    import torch_bridge  # noqa: F401  # registers it

    for (a, xa), (b, xb) in itertools.product(zip(_of_kinds("cpu"), _of_kinds("xla"), strict=True), repeat=2):
        if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
            assert torch.result_type(xa, xb) == torch.result_type(a, b), (a, b)


@pytest.mark.parametrize("given", KINDS)
def test_in_place_sums_are_refused_as_in_torch(given: torch.dtype) -> None:
    """float into int, complex into float: what would be lost is an error."""

    def outcome(device: str, other: torch.dtype) -> object:
        try:
            return torch.ones(2, dtype=given, device=device).add_(torch.ones(2, dtype=other, device=device)).dtype
        except RuntimeError as error:
            return type(error)

    for other in KINDS:
        assert outcome("xla", other) == outcome("cpu", other), other


@pytest.mark.parametrize("number", [True, 3, 2.5, -1, 300])
@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.float16, torch.complex64])
def test_a_number_is_copied_into_a_tensor(number: float, dtype: torch.dtype) -> None:
    def copied(device: str) -> torch.Tensor:
        x = torch.zeros(2, 3, dtype=dtype, device=device)
        x[:, 1].copy_(number)
        assert torch.zeros(2, dtype=dtype, device=device).copy_(number).dtype == dtype
        return x.cpu()

    torch.testing.assert_close(copied("xla"), copied("cpu"))


IN_PLACE = {
    "a mask to a mask": lambda d: torch.tensor([True, False], device=d).pow_(True),
    "bits by a mask": lambda d: torch.tensor([1, 2], device=d).__ilshift__(torch.tensor([True, False], device=d)),
    "a mask filled with a complex number": lambda d: torch.tensor([True, False], device=d).masked_fill_(torch.tensor(True, device=d), 0j),
    "whole numbers times powers": lambda d: torch.tensor([1.0, 2.0], device=d).ldexp_(torch.tensor([1, 2], device=d)),
}


@pytest.mark.parametrize("write", IN_PLACE.values(), ids=IN_PLACE)
def test_in_place_as_the_functional_form(write: Any) -> None:
    torch.testing.assert_close(write("xla").cpu(), write("cpu"))


def test_in_place_into_less_than_the_result() -> None:
    for d in ("cpu", "xla"):
        with pytest.raises(RuntimeError, match=r"output with shape \[1\] doesn't match the broadcast shape \[2\]"):
            torch.tensor([1], device=d).__ilshift__(torch.tensor([True, False], device=d))


def test_what_the_refusal_says() -> None:
    with pytest.raises(
        RuntimeError, match=r"result type torch.complex64 can't be cast to the desired output type torch.float32: it would lose"
    ):
        torch.ones(2, device="xla").mul_(1j)
    for write in (lambda x: x.add_(1.5), lambda x: x.sub_(torch.ones(2, device="xla"))):
        with pytest.raises(
            RuntimeError, match=r"result type torch.float32 can't be cast to the desired output type torch.int64: it would lose"
        ):
            write(torch.ones(2, dtype=torch.int64, device="xla"))


WRITES: dict[str, object] = {
    "mul_": lambda x, other: x.mul_(other),
    "addcmul_": lambda x, other: x.addcmul_(other, other),
    "out=": lambda x, other: torch.mul(x, other, out=x),
    "index_put_": lambda x, other: x.index_put_((torch.tensor([1, 0], device=x.device),), other),
    "index_add_": lambda x, other: x.index_add_(0, torch.tensor([1, 0], device=x.device), other),
}


@pytest.mark.parametrize("name", WRITES)
def test_writes_are_refused_as_in_torch(name: str) -> None:
    def outcome(device: str, held: torch.dtype, given: torch.dtype) -> object:
        try:
            return WRITES[name](torch.ones(2, dtype=held, device=device), torch.ones(2, dtype=given, device=device)).dtype  # type: ignore[operator]
        except RuntimeError as error:
            return type(error)

    for held, given in itertools.product((torch.uint8, torch.int32, torch.float32), repeat=2):
        assert outcome("xla", held, given) == outcome("cpu", held, given), (held, given)


@pytest.mark.parametrize("other", [3, torch.tensor([0, 1, 2]), torch.tensor([2, 0, 1], dtype=torch.uint8)], ids=str)
def test_bools_are_shifted_as_integers(other: Any) -> None:
    """Packing a mask into bits."""
    mask = torch.tensor([True, False, True])
    there = other.to("xla") if isinstance(other, torch.Tensor) else other
    for shifted in (operator.lshift, operator.rshift):
        expected, found = shifted(mask, other), shifted(mask.to("xla"), there)
        assert found.dtype == expected.dtype and found.tolist() == expected.tolist()
        if isinstance(other, torch.Tensor):
            assert shifted(there, mask.to("xla")).tolist() == shifted(other, mask).tolist()
