"""The product of a layer's input and its quantized weight. (NxD has no such functions.)"""

from __future__ import annotations

from typing import Any

import torch

from nxd_jax.quantization.dequantize import direct_cast_dequantize, float_scale, scale_dequantize
from nxd_jax.quantization.quantization_config import ActivationQuantizationType, DtypeBound
from nxd_jax.quantization.quantization_utils import quantize_static_quant_activations
from nxd_jax.quantization.schemes import quantize_tokens
from nxd_jax.tensor_parallel import regions
from nxd_jax.tensor_parallel.base_layer import BaseParallelLinear
from nxd_jax.tensor_parallel.casting import cast_if_autocast_enabled
from nxd_jax.tensor_parallel.matmul import without_autocast

_BARELY = 1 + 1e-6
"""A token's largest entry over its own scale may be so far beyond the bound."""


def product(
    layer: Any, x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, all_reduce: bool = False, gather: bool = False
) -> torch.Tensor:
    """x times the dequantized weight, in x's dtype (under autocast, in its): a rank's own result, before its sum over ranks.

    The quantized numbers are multiplied as they are, and the result by the scale; blocks' scales multiply the weight. layer: the layer, whose inputs are
    quantized, too, if it says so. scale: for the weight, such as it broadcasts with the result. all_reduce, gather: see `LinearWithAsyncCommunication`.
    """
    (x,) = cast_if_autocast_enabled(x)
    with without_autocast():
        wide = torch.float32 if x.dtype is torch.float16 else x.dtype  # products of numbers up to 127 or 240 leave float16's range
        numbers, factor = _quantized(layer, x)
        if layer._scheme.is_blockwise:
            weight = layer._scheme.dequantize(weight, scale, wide)
        else:
            weight = direct_cast_dequantize(weight, wide)
        if factor is not None and gather and factor.dim() == x.dim():
            factor = regions.gather_along_dim(factor, layer.sequence_dimension, layer.tensor_parallel_group)
        if not layer._scheme.is_blockwise:
            over = layer._over_result(float_scale(scale), x)
            factor = over if factor is None else factor * over
        out: torch.Tensor = BaseParallelLinear._multiply(layer, numbers.to(wide), weight, all_reduce, gather)
        return out.to(x.dtype) if factor is None else scale_dequantize(out, factor, x.dtype)


def _quantized(layer: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(the input as quantized numbers, their scale), or (the input, None)."""
    kind = layer.activation_quantization_type
    if kind is ActivationQuantizationType.NONE:
        return x, None
    with torch.no_grad():
        if kind is ActivationQuantizationType.DYNAMIC:
            numbers, scale = quantize_tokens(x, torch.float8_e4m3fn, layer.clamp_bound)
        else:
            numbers = quantize_static_quant_activations(x, layer.input_scale, layer.quantized_dtype.value)
            scale = layer.input_scale.to(torch.float32)
    if x.requires_grad and torch.is_grad_enabled():
        numbers = _Numbers.apply(x, numbers, scale, DtypeBound.from_torch_dtype(numbers.dtype))
    return numbers, scale


class _Numbers(torch.autograd.Function):
    """Quantized numbers in float32. The gradient is that of x / scale where nothing was clipped: rounding has none, and float8 would round gradients, too."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, numbers: torch.Tensor, scale: torch.Tensor, bounds: tuple[float, float]) -> torch.Tensor:
        ctx.save_for_backward(x, scale)
        ctx.bounds = bounds
        return numbers.to(torch.float32)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, scale = ctx.saved_tensors
        most, least = (bound * _BARELY for bound in ctx.bounds)
        exact = x.to(torch.float32) / scale
        return (grad / scale).masked_fill((exact > most) | (exact < least), 0).to(x.dtype), None, None, None
