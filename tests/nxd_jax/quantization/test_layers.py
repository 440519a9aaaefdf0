"""Quantized parallel layers: results against the undivided dequantized layer."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from nxd_jax.quantization.quantization_layers import QuantizedColumnParallel, QuantizedRowParallel
from nxd_jax.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from tests.nxd_jax.conftest import Nxd
from tests.nxd_jax.parallel_layers.parts import close, collectives_run, joined, per_rank
from tests.nxd_jax.quantization.layers import CHANNEL, IN, LAYERS, OUT, SCHEMES, TENSOR, dequantized, full, linear, parts


@pytest.mark.core(keep=7)
@pytest.mark.parametrize("tp", [4, 2, 1])
@pytest.mark.parametrize("name", SCHEMES)
def test_column(nxd: Nxd, name: str, tp: int) -> None:
    nxd(4, tp=tp)
    gather = name != "int8 channel"
    float_layer = linear(ColumnParallelLinear, gather_output=gather)
    layer = QuantizedColumnParallel.from_float(float_layer, SCHEMES[name], quantize_weights=True)
    x = torch.randn(3, 2, IN)
    expected = F.linear(x, dequantized(float_layer, SCHEMES[name]), full(float_layer.bias))
    y = layer(x.to("xla"))
    assert y.shape == (3, 2, OUT if gather else OUT // tp)
    torch.testing.assert_close(per_rank(y)[1] if gather else joined(y, -1), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.core(keep=7)
@pytest.mark.parametrize("tp", [4, 2, 1])
@pytest.mark.parametrize("name", SCHEMES)
def test_row(nxd: Nxd, name: str, tp: int) -> None:
    """Each rank's own result is scaled before the sum."""
    nxd(4, tp=tp)
    parallel = name == "int8 channel"
    float_layer = linear(RowParallelLinear, input_is_parallel=parallel)
    layer = QuantizedRowParallel.from_float(float_layer, SCHEMES[name], quantize_weights=True)
    x = torch.randn(3, 2, IN)
    expected = F.linear(x, dequantized(float_layer, SCHEMES[name]), full(float_layer.bias))
    close(layer(parts(x, -1) if parallel else x.to("xla")), expected, rtol=1e-5)


@pytest.mark.core(keep=1)
@pytest.mark.parametrize("name", ["e5m2 channel", "blocks"])
@pytest.mark.parametrize("dim", [0, 1])
def test_sequence_parallelism(nxd: Nxd, name: str, dim: int) -> None:
    nxd(4, tp=2)
    column = linear(ColumnParallelLinear, gather_output=False, sequence_parallel_enabled=True, sequence_dimension=dim)
    row = RowParallelLinear(OUT, IN, input_is_parallel=True, sequence_parallel_enabled=True, sequence_dimension=dim).to("xla")
    first = QuantizedColumnParallel.from_float(column, SCHEMES[name], quantize_weights=True)
    second = QuantizedRowParallel.from_float(row, SCHEMES[name], quantize_weights=True)
    x = torch.randn(4, 6, IN)
    inner = F.linear(x, dequantized(column, SCHEMES[name]), full(column.bias))
    expected = F.linear(inner, dequantized(row, SCHEMES[name]), full(row.bias))
    y = second(first(parts(x, dim)))
    assert y.shape[dim] == x.shape[dim] // 2
    torch.testing.assert_close(joined(y, dim), expected, atol=1e-5, rtol=1e-5)
    assert second.bias.sequence_parallel_enabled


def test_ordering_and_fused_weights(nxd: Nxd) -> None:
    nxd(4, tp=4)
    order = [2, 0, 3, 1]
    float_layer = linear(ColumnParallelLinear, gather_output=True, stride=2, rank_ordering=order)
    layer = QuantizedColumnParallel.from_float(float_layer, CHANNEL, quantize_weights=True)
    assert layer.scale.partition_stride == 2 and list(layer.scale.rank_ordering) == order
    x = torch.randn(2, IN)
    close(layer(x.to("xla")), F.linear(x, dequantized(float_layer, CHANNEL), full(float_layer.bias)), rtol=1e-5)


def test_the_bias_beside_the_result(nxd: Nxd) -> None:
    """A layer that leaves its bias to be added later goes on doing so. (NxD's adds it.)"""
    nxd(2, tp=2)
    for kind, quantized in LAYERS.items():
        out, bias = quantized.from_float(linear(kind, skip_bias_add=True), TENSOR)(torch.ones(2, IN, device="xla"))
        assert out.shape == (2, OUT) and bias.shape == (OUT,)


def test_scheme_of_collectives(nxd: Nxd) -> None:
    """One sum, of the scaled results; none for scales."""
    nxd(4, tp=4)
    layer = QuantizedRowParallel.from_float(linear(RowParallelLinear, input_is_parallel=True), CHANNEL)
    x = parts(torch.randn(2, IN), -1)
    y = layer(x)
    assert collectives_run() == {"all_reduce": 1} and y.shape == (2, OUT)
