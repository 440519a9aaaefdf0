"""`neuronx_distributed.quantization.dequantize`: quantized tensors back to floats."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from nxd_jax.quantization.microscaling import e8m0_to_float, fp4_to_float
from nxd_jax.quantization.quantization_config import QuantizedDtype, ScaleDtype

DEFAULT_BLOCK_SIZE = 128
OCP_MX_BLOCK_SIZE = 32


def direct_cast_dequantize(tensor: torch.Tensor, upcast_dtype: torch.dtype) -> torch.Tensor:
    """A tensor in another dtype, without a scale."""
    return tensor.to(upcast_dtype)


def scale_dequantize(tensor: torch.Tensor, scale: torch.Tensor, upcast_dtype: torch.dtype) -> torch.Tensor:
    """A tensor times a scale that broadcasts with it, multiplied in float32, in `upcast_dtype`. A scale of bytes is one of exponents (`ScaleDtype.F8E8M0`)."""
    return (tensor.to(torch.float32) * float_scale(scale)).to(upcast_dtype)


def float_scale(scale: torch.Tensor) -> torch.Tensor:
    """A scale in float32; of bytes 2 ** (byte - 127). (NxD has no such function.)"""
    return e8m0_to_float(scale) if scale.dtype is ScaleDtype.F8E8M0.value else scale.to(torch.float32)


def blockwise_scale_dequantize(
    tensor: torch.Tensor, scale: torch.Tensor, upcast_dtype: torch.dtype, mx_swizzle: bool = False
) -> torch.Tensor:
    """A tensor of which every block has a scale: [..., n * block, ...] with a scale [..., n, ...] -> the same shape, in `upcast_dtype`.

    scale: float32 or exponents; dims that it lacks at the end are one block each. A tensor of uint16 has four F4E2M1FN numbers in one: its last dim becomes
    four times as long, and the scale's blocks are of that. Such tensors must be on the CPU.

    Raises AssertionError for sizes that do not fit, or packed numbers elsewhere; ValueError for `mx_swizzle`, a layout of Neuron's kernels.
    """
    if mx_swizzle:
        raise ValueError("mx_swizzle=True is the layout of MX weights for Neuron's kernels: dequantize the checkpoint's own layout instead")
    if tensor.dtype is QuantizedDtype.F4E2M1FN_X4.value:
        if tensor.device.type != "cpu":
            raise AssertionError(
                f"packed F4 numbers can be dequantized on the CPU only, these are on {tensor.device}: move them there with .cpu()"
            )
        tensor = fp4_to_float(tensor)
    blocks, factors = get_broadcastable_shapes_for_blockwise_scale_dequantize(tensor.shape, scale.shape)
    return scale_dequantize(tensor.reshape(blocks), scale.reshape(factors), upcast_dtype).reshape(tensor.shape)


def get_broadcastable_shapes_for_blockwise_scale_dequantize(
    tensor_shape: Sequence[int], scale_shape: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes for a tensor and its scale in which they broadcast: dims of n blocks become [n, block] and [n, 1].

    Dims of one block are left alone. Raises AssertionError for a scale with more dims or larger ones, one that does not divide the tensor, and one that has
    a number for each entry.
    """
    given = f"a tensor of shape {list(tensor_shape)} with a scale of shape {list(scale_shape)}"
    if len(scale_shape) > len(tensor_shape):
        raise AssertionError(f"{given}: the scale cannot have more dims than the tensor")
    padded = [*scale_shape, *[1] * (len(tensor_shape) - len(scale_shape))]
    blocks: list[int] = []
    factors: list[int] = []
    for size, count in zip(tensor_shape, padded, strict=True):
        if count > size:
            raise AssertionError(f"{given}: the scale cannot be larger than the tensor")
        if size % count:
            raise AssertionError(f"{given}: {size} entries cannot be cut into {count} equal blocks")
        whole = count in (1, size)
        blocks += [size] if whole else [count, size // count]
        factors += [count] if whole else [count, 1]
    if tuple(padded) == tuple(tensor_shape) and len(scale_shape) == len(tensor_shape):
        raise AssertionError(f"{given}: there are no blocks, each entry has a scale of its own")
    return tuple(blocks), tuple(factors)
