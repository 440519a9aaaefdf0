"""Quantized weights against formulas: the error of every number, and scales that clip nothing and waste nothing."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from nxd_jax.quantization.quantization_config import QuantizationType as Kind
from nxd_jax.quantization.schemes import Scheme, quantize_tokens

FORMATS: dict[torch.dtype, tuple[float, Any, int, int]] = {
    torch.int8: (127.0, np.int8, 0, 0),
    torch.float8_e4m3fn: (240.0, ml_dtypes.float8_e4m3, 3, -6),  # Neuron's: with infinities
    torch.float8_e5m2: (57344.0, ml_dtypes.float8_e5m2, 2, -14),
}
"""The largest number, ml_dtypes' type, bits of the mantissa, and the least exponent of a normal number."""

SCHEMES = {
    "tensor": (Kind.PER_TENSOR_SYMMETRIC, (6, 10), None, (), (1,)),
    "rows": (Kind.PER_CHANNEL_SYMMETRIC, (6, 10), 0, (), (6, 1)),
    "channels of all experts": (Kind.PER_CHANNEL_SYMMETRIC, (4, 6, 10), 2, (), (1, 1, 10)),
    "channels of each expert": (Kind.EXPERT_WISE_PER_CHANNEL_SYMMETRIC, (4, 6, 10), 2, (), (4, 1, 10)),
    "blocks": (Kind.BLOCKWISE_SYMMETRIC, (6, 10), None, ((0, 3), (1, 5)), (2, 2)),
    "blocks of a row": (Kind.BLOCKWISE_SYMMETRIC, (6, 10), None, ((1, 5),), (6, 2)),
    "last blocks with fewer": (Kind.BLOCKWISE_SYMMETRIC, (6, 10), None, ((0, 4), (1, 4)), (2, 3)),
    "blocks of experts": (Kind.BLOCKWISE_SYMMETRIC, (4, 6, 10), None, ((1, 2), (2, 10)), (4, 3, 1)),
    "one block": (Kind.BLOCKWISE_SYMMETRIC, (6, 10), None, ((0, 128), (1, 128)), (1, 1)),
    "a number for each": (Kind.BLOCKWISE_SYMMETRIC, (6, 10), None, ((0, 1),), (6, 10)),
}


def weight_of(shape: tuple[int, ...]) -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(shape) * torch.linspace(0.01, 30.0, shape[-1])


def by_number(scale: np.ndarray, shape: tuple[int, ...], blocks: tuple[tuple[int, int], ...]) -> np.ndarray:
    """The scale of every number."""
    for dim, size in blocks:
        scale = np.take(scale, np.arange(shape[dim]) // size, axis=dim)
    return np.broadcast_to(scale, shape)


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("name", SCHEMES)
def test_errors_are_as_small_as_the_format_allows(name: str, dtype: torch.dtype) -> None:
    kind, shape, axis, blocks, expected_shape = SCHEMES[name]
    bound, numpy_type, bits, least = FORMATS[dtype]
    weight = weight_of(shape)
    scheme = Scheme(kind, dtype, axis, blocks)
    quantized, scale = scheme.quantize(weight)
    assert (
        quantized.dtype is dtype
        and scale.dtype is torch.float32
        and tuple(scale.shape) == expected_shape == tuple(scheme.scale_shape(shape))
    )
    each = by_number(scale.numpy(), shape, blocks)
    exact = weight.numpy() / each
    expected = np.round(exact) if dtype is torch.int8 else exact
    np.testing.assert_array_equal(quantized.float().numpy(), np.clip(expected, -bound, bound).astype(numpy_type).astype(np.float32))

    error = np.abs(scheme.dequantize(quantized, scale, torch.float32).numpy() - weight.numpy())
    unit = each if dtype is torch.int8 else each * 2.0 ** (np.maximum(np.floor(np.log2(np.abs(exact) + 1e-30)), least) - bits)
    assert (error <= unit / 2 * (1 + 1e-5) + 1e-7).all()

    found = np.abs(quantized.float().numpy())
    assert found.max() == bound
    for one in np.unique(each):
        assert found[each == one].max() == bound, "a scale that could be smaller"


def test_zeros_have_a_scale_of_one() -> None:
    weight = torch.zeros(3, 4)
    weight[1] = 1e-6
    for dtype in FORMATS:
        quantized, scale = Scheme(Kind.PER_CHANNEL_SYMMETRIC, dtype, 0).quantize(weight)
        assert scale[0] == scale[2] == 1 and not quantized[0].float().any()
        torch.testing.assert_close(quantized.float() * scale, weight)


def test_448(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NXD_JAX_FP8_MAX", "448")
    quantized, scale = Scheme(Kind.PER_TENSOR_SYMMETRIC, torch.float8_e4m3fn).quantize(torch.tensor([-7.0, 3.5]))
    assert quantized.float().tolist() == [-448.0, 224.0] and scale.tolist() == [7 / 448]


@pytest.mark.parametrize("name", ["rows", "last blocks with fewer", "channels of each expert"])
def test_exponents_as_scales(name: str) -> None:
    """The least power of two with which nothing is clipped."""
    kind, shape, axis, blocks, expected_shape = SCHEMES[name]
    weight = weight_of(shape)
    quantized, scale = (scheme := Scheme(kind, torch.float8_e4m3fn, axis, blocks, torch.uint8)).quantize(weight)
    _, exact = Scheme(kind, torch.float8_e4m3fn, axis, blocks).quantize(weight)
    assert scale.dtype is torch.uint8 and tuple(scale.shape) == expected_shape
    np.testing.assert_array_equal(scale.numpy(), np.ceil(np.log2(exact.numpy().astype(np.float64))) + 127)
    error = (scheme.dequantize(quantized, scale, torch.float32) - weight).abs()
    assert (error <= weight.abs() / 16 + 2.0 ** (scale.float().max() - 127) * 2.0**-10).all()


def test_tokens() -> None:
    x = torch.randn(2, 3, 8) * torch.tensor([0.1, 1.0, 100.0]).reshape(1, 3, 1)
    numbers, scale = quantize_tokens(x, torch.float8_e4m3fn, float("inf"))
    assert scale.shape == (2, 3, 1)
    np.testing.assert_allclose(scale.numpy(), np.abs(x.numpy()).max(-1, keepdims=True) / 240, rtol=1e-6)
    numbers, scale = quantize_tokens(x, torch.float8_e4m3fn, 10.0)
    assert scale.max() == torch.tensor(10.0 / 240) and numbers.float().abs().max() == 240
    assert ((numbers.float() * scale).abs() <= 10.001).all()
