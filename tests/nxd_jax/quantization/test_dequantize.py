"""Quantized tensors back to floats, packed ones too, against NumPy and ml_dtypes."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch

from nxd_jax.quantization.dequantize import (
    blockwise_scale_dequantize,
    direct_cast_dequantize,
    get_broadcastable_shapes_for_blockwise_scale_dequantize,
    scale_dequantize,
)
from nxd_jax.quantization.microscaling import float_to_e8m0
from nxd_jax.quantization.microscaling import transform_weights as mx
from nxd_jax.quantization.quantization_config import QuantizedDtype
from nxd_jax.quantization.quantize import direct_cast_quantize


def test_casts() -> None:
    numbers = torch.tensor([-10, 30], dtype=torch.int8)
    assert torch.equal(direct_cast_dequantize(numbers, torch.bfloat16), torch.tensor([-10.0, 30.0], dtype=torch.bfloat16))
    assert direct_cast_quantize(torch.tensor([1.06, 300.0]), torch.float8_e4m3fn).float().tolist() == [1.0, 288.0]


def test_scale() -> None:
    numbers = torch.tensor([-10, 30], dtype=torch.int8)
    made = scale_dequantize(numbers, torch.tensor(10.0), torch.bfloat16)
    assert torch.equal(made, torch.tensor([-100.0, 300.0], dtype=torch.bfloat16))
    assert torch.equal(scale_dequantize(numbers, torch.tensor([128, 126], dtype=torch.uint8), torch.float32), torch.tensor([-20.0, 15.0]))
    rows = torch.tensor([[1, 2], [3, 4]], dtype=torch.int8)
    assert scale_dequantize(rows, torch.tensor([[2.0], [0.5]]), torch.float32).tolist() == [[2.0, 4.0], [1.5, 2.0]]


@pytest.mark.parametrize("lead", [(), (3,)])
@pytest.mark.parametrize("shape, block", [((24, 32), (8, 8)), ((6, 4), (6, 4)), ((6, 32), (6, 8)), ((32, 32), (1, 32)), ((32, 32), (4, 8))])
def test_blocks(lead: tuple[int, ...], shape: tuple[int, int], block: tuple[int, int]) -> None:
    torch.manual_seed(0)
    numbers = torch.randn(*lead, *shape).to(torch.float8_e4m3fn)
    scale = torch.rand(*lead, shape[0] // block[0], shape[1] // block[1]) * 10
    expected = numbers.float().numpy() * np.repeat(np.repeat(scale.numpy(), block[0], -2), block[1], -1)
    made = blockwise_scale_dequantize(numbers, scale, torch.float32)
    assert made.shape == numbers.shape
    np.testing.assert_array_equal(made.numpy(), expected)


@pytest.mark.parametrize("shape", [(5, 3, 16), (2, 5, 3, 16)])
def test_packed_numbers(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    octets = torch.randint(0, 256, shape, dtype=torch.uint8)
    scale = torch.randint(120, 135, shape[:-1], dtype=torch.uint8)
    codes = np.stack([octets.numpy() & 15, octets.numpy() >> 4], -1).reshape(*shape[:-1], 32)
    numbers = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    expected = torch.from_numpy(numbers * scale.numpy().view(ml_dtypes.float8_e8m0fnu).astype(np.float32)[..., None])
    flat = expected.flatten(-2)
    packed = mx.pack_fp4_x4_uint16(octets)
    assert packed.dtype is QuantizedDtype.F4E2M1FN_X4.value and packed.shape == (*shape[:-1], 8)
    assert torch.equal(blockwise_scale_dequantize(packed, scale, torch.float32), expected)
    assert torch.equal(mx.get_mxfp4_tensor(octets, scale, dtype=torch.float32), flat)
    assert torch.equal(mx.get_mxfp4_tensor_from_uint16(packed, scale, dtype=torch.float32), flat)
    assert torch.equal(mx.get_mxfp4_tensor_from_uint16(packed, scale, output_quad_row=True), flat.bfloat16().unflatten(-1, (-1, 4)))
    assert torch.equal(mx.split_byte_4bit_tensor(octets), torch.from_numpy(codes))
    assert torch.equal(mx.pack_byte_4bit_tensor(mx.split_byte_4bit_tensor(octets)), octets)
    assert torch.equal(mx.apply_lut_byte_4bit_tensor(torch.from_numpy(codes)), torch.from_numpy(numbers))
    swizzled = packed.view(torch.int16).reshape(*shape[:-1], 8).view(torch.uint16)
    with pytest.raises(ValueError, match="mx_swizzle=True is the layout of MX weights for Neuron's kernels"):
        blockwise_scale_dequantize(swizzled, scale, torch.float32, mx_swizzle=True)
    with pytest.raises(AssertionError, match="on the CPU only, these are on meta"):
        blockwise_scale_dequantize(packed.to("meta"), scale, torch.float32)


def test_packed_float8() -> None:
    numbers = (torch.arange(64.0).reshape(2, 32) / 8).to(torch.float8_e4m3fn)
    packed = numbers.view(torch.uint32).reshape(2, 1, 8)
    scale = torch.tensor([[126], [130]], dtype=torch.uint8)
    expected = numbers.float() * torch.tensor([[0.5], [8.0]])
    assert torch.equal(mx.get_mxfp8_tensor_from_uint32(packed, scale, dtype=torch.float32), expected)
    assert mx.get_mxfp8_tensor_from_uint32(packed, scale, output_quad_row=True).shape == (2, 8, 4)
    nan = torch.full((1, 1, 8), 0xFFFFFFFF, dtype=torch.int64).to(torch.uint32)
    assert not mx.get_mxfp8_tensor_from_uint32(nan, scale[:1], replace_nan_with_zeros=True).any()
    with pytest.raises(AssertionError, match=r"blocks of shape \[2, 1, 8\] need scales of shape \[2, 1\], got \[2\]"):
        mx.get_mxfp8_tensor_from_uint32(packed, scale[:, 0])


def test_exponents() -> None:
    found = float_to_e8m0(torch.tensor([1.0, 1.1, 0.5, 2.0**-127, 2.0**-140, 3e38]))
    assert found.tolist() == [127, 128, 126, 0, 0, 254]


@pytest.mark.parametrize("wrong", ["dtype", "odd"])
def test_what_cannot_be_packed(wrong: str) -> None:
    given = torch.zeros(3, dtype=torch.uint8) if wrong == "odd" else torch.zeros(4)
    with pytest.raises(AssertionError, match="patterns to pack are uint8, an even number"):
        mx.pack_byte_4bit_tensor(given)
    if wrong == "dtype":
        with pytest.raises(AssertionError, match="expected torch.uint8, two numbers of four bits in each, got torch.float32"):
            mx.pack_fp4_x4_uint16(given)


WRONG = {
    ((128, 128), (128, 128)): "there are no blocks",
    ((128, 128), (256, 256)): "the scale cannot be larger",
    ((128, 128), (64, 64, 64)): "cannot have more dims",
    ((128, 128), (49, 49)): "128 entries cannot be cut into 49 equal blocks",
}


@pytest.mark.parametrize("shapes", WRONG)
def test_shapes_that_do_not_fit(shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    with pytest.raises(AssertionError, match=WRONG[shapes]):
        get_broadcastable_shapes_for_blockwise_scale_dequantize(*shapes)


@pytest.mark.parametrize(
    "shapes, expected",
    [
        (((128, 128), (128, 1)), ((128, 128), (128, 1))),
        (((128, 128), (1, 64)), ((128, 64, 2), (1, 64, 1))),
        (((128, 128), (64,)), ((64, 2, 128), (64, 1, 1))),
        (((128, 128), (64, 64)), ((64, 2, 64, 2), (64, 1, 64, 1))),
        (((128, 128, 128), (128, 64, 128)), ((128, 64, 2, 128), (128, 64, 1, 128))),
    ],
)
def test_broadcastable_shapes(shapes: tuple[tuple[int, ...], tuple[int, ...]], expected: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    assert get_broadcastable_shapes_for_blockwise_scale_dequantize(*shapes) == expected
