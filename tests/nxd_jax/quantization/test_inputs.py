"""Inputs of quantized layers: quantized ones, their dtypes, their gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from nxd_jax.quantization import quantization_config as config
from nxd_jax.quantization.quantization_layers import QuantizedColumnParallel, QuantizedRowParallel
from nxd_jax.quantization.schemes import quantize_tokens
from nxd_jax.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from tests.nxd_jax.conftest import Nxd
from tests.nxd_jax.parallel_layers.parts import close, joined
from tests.nxd_jax.quantization.layers import CHANNEL, IN, LAYERS, SCHEMES, TENSOR, dequantized, full, linear, parts


@pytest.mark.core(keep=2)
@pytest.mark.parametrize("name", ["e4m3 tensor, exponents", "blocks"])
@pytest.mark.parametrize("kind", LAYERS)
def test_dynamic_inputs(nxd: Nxd, kind: Any, name: str) -> None:
    """A float8 scale for each token, of a rank's own part of it in a row layer. (NxD's tokens at one position share one.)"""
    nxd(2, tp=2)
    q_config: Any = {**SCHEMES[name], "activation_quantization_type": "dynamic", "clamp_bound": 2.0}
    float_layer = linear(kind)
    layer = LAYERS[kind].from_float(float_layer, q_config, quantize_weights=True)
    x = torch.randn(3, 5, IN) * torch.logspace(-2, 1, 3).reshape(3, 1, 1)
    pieces = x.chunk(2, -1) if kind is RowParallelLinear else [x]
    seen = [torch.mul(*(t.float() for t in quantize_tokens(p, torch.float8_e4m3fn, 2.0))) for p in pieces]
    expected = F.linear(torch.cat(seen, -1), dequantized(float_layer, q_config), full(float_layer.bias))
    close(layer(x.to("xla")), expected)
    assert (expected - F.linear(x, dequantized(float_layer, q_config), full(float_layer.bias))).abs().max() > 0.01


def test_dynamic_inputs_in_a_sequence(nxd: Nxd) -> None:
    """Scales of tokens are gathered with their tokens. (NxD multiplies by those of a rank's own.)"""
    nxd(2, tp=2)
    q_config: Any = {**TENSOR, "activation_quantization_type": "dynamic"}
    float_layer = linear(ColumnParallelLinear, gather_output=False, sequence_parallel_enabled=True, sequence_dimension=0)
    layer = QuantizedColumnParallel.from_float(float_layer, q_config, quantize_weights=True)
    x = torch.randn(4, 2, IN) * torch.logspace(-1, 1, 4).reshape(4, 1, 1)
    numbers, scale = quantize_tokens(x, torch.float8_e4m3fn, float("inf"))
    expected = F.linear(numbers.float() * scale, dequantized(float_layer, q_config), full(float_layer.bias))
    torch.testing.assert_close(joined(layer(parts(x, 0)), -1), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", LAYERS)
def test_static_inputs(nxd: Nxd, kind: Any, caplog: pytest.LogCaptureFixture) -> None:
    nxd(2, tp=2)
    q_config: Any = {**TENSOR, "activation_quantization_type": config.ActivationQuantizationType.STATIC}
    float_layer = linear(kind)
    layer = LAYERS[kind].from_float(float_layer, q_config, quantize_weights=True)
    assert "input_scale is 1 until it is loaded or set" in caplog.text
    assert set(layer.state_dict()) == {"weight", "scale", "bias", "input_scale"} and layer.input_scale.shape == (1,)
    x = torch.randn(3, IN)
    layer.load_state_dict({**layer.state_dict(), "input_scale": torch.tensor([0.02])})
    seen = (x / 0.02).round().clamp(-128, 127) * 0.02
    assert (seen - x).abs().max() > 0.1, "something is to be clipped"
    close(layer(x.to("xla")), F.linear(seen, dequantized(float_layer, q_config), full(float_layer.bias)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_inputs_of_other_dtypes(nxd: Nxd, dtype: torch.dtype) -> None:
    """Of 4096 inputs float16's range could not hold the sum of products that are not scaled yet."""
    nxd(2, tp=2)
    torch.manual_seed(0)
    float_layer = ColumnParallelLinear(4096, 4, bias=False, init_method=torch.nn.init.ones_).to("xla")
    layer = QuantizedColumnParallel.from_float(float_layer, CHANNEL, quantize_weights=True).to(dtype)
    y = layer(torch.ones(2, 4096, dtype=dtype, device="xla"))
    assert y.dtype is dtype and layer.weight.dtype is torch.int8 and layer.scale.dtype is torch.float32
    close(y.float(), torch.full((2, 4), 4096.0), rtol=0.01)


def test_autocast(nxd: Nxd) -> None:
    nxd(2, tp=2)
    layer = QuantizedRowParallel.from_float(linear(RowParallelLinear), CHANNEL, quantize_weights=True)
    x = torch.randn(2, IN).to("xla")
    with torch.autocast("xla", dtype=torch.bfloat16):
        y = layer(x)
    assert y.dtype is torch.bfloat16
    torch.testing.assert_close(y.float().cpu(), layer(x).detach().cpu(), atol=0.05, rtol=0.05)


def test_the_gradient_of_the_input(nxd: Nxd) -> None:
    """What stands before quantized layers can be trained; they themselves are not."""
    nxd(2, tp=2)
    float_layer = linear(ColumnParallelLinear)
    layer = QuantizedColumnParallel.from_float(float_layer, CHANNEL, quantize_weights=True)
    x = torch.randn(3, IN)
    given = x.to("xla").requires_grad_()
    layer(given).square().sum().backward()
    reference = x.requires_grad_()
    F.linear(reference, dequantized(float_layer, CHANNEL), full(float_layer.bias)).square().sum().backward()
    assert reference.grad is not None
    close(given.grad, reference.grad)  # type: ignore[arg-type]
    assert not any(p.requires_grad for p in layer.parameters())
