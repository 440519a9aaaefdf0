"""Which numbers of a weight share a scale, and what the quantized numbers and scales of a float weight are. (NxD has no such functions.)"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from nxd_jax.quantization.dequantize import blockwise_scale_dequantize, scale_dequantize
from nxd_jax.quantization.microscaling import float_to_e8m0
from nxd_jax.quantization.quantization_config import DtypeBound, QuantizationType, ScaleDtype

_TINY = torch.finfo(torch.float32).tiny


@dataclasses.dataclass(frozen=True)
class Scheme:
    """How a weight is quantized: `weight = quantized * scale`.

    kind: what shares a scale. dtype: of the quantized numbers, int8, float8_e4m3fn or float8_e5m2. channel_axis: the weight's output dim, where outputs have
    scales. blocks: (dim, entries) where blocks have; dims that are not named have a scale for each entry. scale_dtype: float32, or uint8 for exponents.
    """

    kind: QuantizationType
    dtype: torch.dtype
    channel_axis: int | None = None
    blocks: tuple[tuple[int, int], ...] = ()
    scale_dtype: torch.dtype = torch.float32

    @property
    def is_blockwise(self) -> bool:
        """Whether blocks have scales, which cannot be applied to a product's result."""
        return self.kind is QuantizationType.BLOCKWISE_SYMMETRIC

    def scale_shape(self, weight_shape: Sequence[int]) -> list[int]:
        """The shape of a whole weight's scale; a last block along a dim may have fewer entries than the others."""
        if self.kind is QuantizationType.PER_TENSOR_SYMMETRIC:
            return [1]
        if self.is_blockwise:
            sizes = dict(self.blocks)
            return [-(-n // sizes.get(d, 1)) for d, n in enumerate(weight_shape)]
        own = {self.channel_axis, 0} if self.kind is QuantizationType.EXPERT_WISE_PER_CHANNEL_SYMMETRIC else {self.channel_axis}
        return [n if d in own else 1 for d, n in enumerate(weight_shape)]

    def quantize(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(quantized numbers, their scale) of a whole weight. A scale is the largest absolute value over the dtype's bound: the least that clips nothing."""
        wide = weight.detach().to(torch.float32)
        largest = self.largest(wide.abs())
        scale = scale_of(largest, self.dtype)
        if self.scale_dtype is ScaleDtype.F8E8M0.value:
            scale = float_to_e8m0(scale)
        unit = self.dequantize(torch.ones_like(wide), scale, torch.float32)
        return rounded(wide / unit, self.dtype), scale

    def dequantize(self, quantized: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """A whole weight, or a rank's part with its part of the scale, in `dtype`."""
        if not self.is_blockwise:
            return scale_dequantize(quantized, scale, dtype)
        equal = all(scale.shape[d] == 1 or scale.shape[d] * size == quantized.shape[d] for d, size in self.blocks)
        if equal and scale.shape != quantized.shape:
            return blockwise_scale_dequantize(quantized, scale, dtype)
        for d, size in self.blocks:
            scale = scale.repeat_interleave(size, d).narrow(d, 0, quantized.shape[d])
        return scale_dequantize(quantized, scale, dtype)

    def largest(self, absolute: torch.Tensor) -> torch.Tensor:
        """Of a whole weight's absolute values, the largest that each scale is for, in the scale's shape."""
        shape = self.scale_shape(absolute.shape)
        if self.kind is QuantizationType.PER_TENSOR_SYMMETRIC:
            return absolute.amax().reshape(1)
        if not self.is_blockwise:
            return absolute.amax([d for d, n in enumerate(shape) if n == 1 and d != self.channel_axis], keepdim=True).reshape(shape)
        for d, size in self.blocks:
            more = -absolute.shape[d] % size
            if more:
                zeros = absolute.new_zeros([more if k == d else n for k, n in enumerate(absolute.shape)])
                absolute = torch.cat([absolute, zeros], d)
            absolute = absolute.unflatten(d, (-1, size)).amax(d + 1)
        return absolute


def scale_of(largest: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The float32 scale with which the largest absolute values become the dtype's bound; 1 where they are 0."""
    bound, _ = DtypeBound.from_torch_dtype(dtype)
    wide = largest.to(torch.float32)
    return torch.where(wide > 0, (wide / bound).clamp_min(_TINY), torch.ones_like(wide))


def rounded(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Numbers in a quantized dtype: clipped to its bounds and rounded, to even where two are equally near."""
    bound, least = DtypeBound.from_torch_dtype(dtype)
    x = x.clamp(least, bound)
    return (x if dtype.is_floating_point else x.round()).to(dtype)


def quantize_tokens(x: torch.Tensor, dtype: torch.dtype, clamp_bound: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(quantized numbers, a scale for each token: [..., hidden] and [..., 1]). clamp_bound: the largest absolute value that a scale covers."""
    scale = scale_of(x.abs().amax(-1, keepdim=True).to(torch.float32).clamp_max(clamp_bound), dtype)
    return rounded(x.to(torch.float32) / scale, dtype), scale
