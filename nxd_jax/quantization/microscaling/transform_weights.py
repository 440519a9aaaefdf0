"""`neuronx_distributed.quantization.microscaling.transform_weights`: packed Microscaling tensors to floats, on the CPU.

What NxD has besides brings gpt-oss's weights into the layout of Neuron's kernels; it is not here, nor are the kernels.
"""

from __future__ import annotations

import torch

from nxd_jax.quantization.microscaling.formats import FP4_VALUES, e8m0_to_float, fp4_to_float, nibbles

__all__ = [
    "FP4_VALUES",
    "apply_lut_byte_4bit_tensor",
    "get_mxfp4_tensor",
    "get_mxfp4_tensor_from_uint16",
    "get_mxfp8_tensor_from_uint32",
    "pack_byte_4bit_tensor",
    "pack_fp4_x4_uint16",
    "split_byte_4bit_tensor",
]


def get_mxfp4_tensor(blocks: torch.Tensor, scales: torch.Tensor, *, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """uint8 [..., groups, 16] (two E2M1 numbers in each) times exponents uint8 [..., groups] -> [..., groups * 32] in `dtype`.

    Raises AssertionError if blocks and scales do not fit.
    """
    return _scaled(fp4_to_float(blocks), blocks, scales, dtype)


def get_mxfp4_tensor_from_uint16(
    blocks: torch.Tensor, scales: torch.Tensor, *, dtype: torch.dtype = torch.bfloat16, output_quad_row: bool = False
) -> torch.Tensor:
    """As `get_mxfp4_tensor` for uint16 [..., groups, 8], four numbers in each. output_quad_row: [..., groups * 8, 4] instead."""
    out = _scaled(fp4_to_float(blocks), blocks, scales, dtype)
    return out.unflatten(-1, (-1, 4)) if output_quad_row else out


def get_mxfp8_tensor_from_uint32(
    blocks: torch.Tensor,
    scales: torch.Tensor,
    *,
    dtype: torch.dtype = torch.bfloat16,
    fp8_dtype: torch.dtype = torch.float8_e4m3fn,
    output_quad_row: bool = False,
    replace_nan_with_zeros: bool = False,
) -> torch.Tensor:
    """As `get_mxfp4_tensor_from_uint16` for uint32 [..., groups, 8], four float8 numbers in each."""
    out = _scaled(blocks.contiguous().view(fp8_dtype).to(torch.float32), blocks, scales, dtype)
    out = out.nan_to_num(nan=0.0) if replace_nan_with_zeros else out
    return out.unflatten(-1, (-1, 4)) if output_quad_row else out


def _scaled(numbers: torch.Tensor, blocks: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if blocks.shape[:-1] != scales.shape:
        raise AssertionError(
            f"blocks of shape {list(blocks.shape)} need scales of shape {list(blocks.shape[:-1])}, got {list(scales.shape)}"
        )
    return (numbers * e8m0_to_float(scales).unsqueeze(-1)).flatten(-2).to(dtype)


def split_byte_4bit_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The patterns of four bits in bytes, the lower ones first: [..., n] -> uint8 [..., 2 n]."""
    return nibbles(tensor)


def apply_lut_byte_4bit_tensor(blocks: torch.Tensor, *, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """What patterns of four bits, one in each element, mean as E2M1 numbers."""
    return torch.tensor(FP4_VALUES, dtype=dtype)[blocks.to(torch.int64)]


def pack_byte_4bit_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The inverse of `split_byte_4bit_tensor`. Raises AssertionError for another dtype than uint8, or an odd number of patterns."""
    if tensor.dtype is not torch.uint8 or tensor.shape[-1] % 2:
        raise AssertionError(
            f"a tensor of {tensor.dtype} and shape {list(tensor.shape)}: patterns to pack are uint8, an even number of them in a row"
        )
    return tensor[..., 0::2] | (tensor[..., 1::2] << 4)


def pack_fp4_x4_uint16(tensor: torch.Tensor) -> torch.Tensor:
    """Bytes with two numbers each as uint16 with four: [..., 2 n] -> [..., n]. Raises AssertionError for another dtype than uint8."""
    if tensor.dtype is not torch.uint8:
        raise AssertionError(f"expected torch.uint8, two numbers of four bits in each, got {tensor.dtype}")
    return tensor.contiguous().view(torch.uint16)
