"""Numbers of four bits (E2M1) that lie packed in bytes, and exponents of one byte (E8M0), both of OCP's Microscaling."""

from __future__ import annotations

import math

import torch

_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
FP4_VALUES = [*_POSITIVE, *(-x for x in _POSITIVE)]
"""What the sixteen patterns of E2M1 mean."""

_BIAS = 127
_POWERS = (*(2.0 ** (octet - _BIAS) for octet in range(255)), math.nan)
"""What bytes mean as exponents."""


def nibbles(packed: torch.Tensor) -> torch.Tensor:
    """The patterns in a CPU tensor, four bits each, those of the lowest bits first: [..., n] -> uint8 [..., n * 2 * bytes of an element]."""
    octets = packed.contiguous().view(torch.uint8)
    return torch.stack([octets & 0x0F, octets >> 4], dim=-1).flatten(-2)


def fp4_to_float(packed: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Packed E2M1 numbers as floats: [..., n] -> [..., n * 2 * bytes of an element]."""
    return torch.tensor(FP4_VALUES, dtype=dtype)[nibbles(packed).long()]


def e8m0_to_float(exponents: torch.Tensor) -> torch.Tensor:
    """2 ** (byte - 127) in float32; 255 is NaN."""
    return torch.tensor(_POWERS, dtype=torch.float32, device=exponents.device)[exponents.to(torch.int64)]


def float_to_e8m0(scale: torch.Tensor) -> torch.Tensor:
    """The exponents of the least powers of two that are not below some positive floats, uint8; those beyond the format's ends become its ends."""
    mantissa, exponent = torch.frexp(scale.to(torch.float32))  # scale = mantissa * 2 ** exponent, 0.5 <= mantissa < 1
    return (exponent - (mantissa == 0.5).to(exponent.dtype) + _BIAS).clamp(0, 2 * _BIAS).to(torch.uint8)
