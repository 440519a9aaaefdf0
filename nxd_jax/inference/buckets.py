"""Lengths that programs are traced for."""

from __future__ import annotations

import math
from collections.abc import Sequence


def generate_buckets(min_length: int, max_length: int) -> list[int]:
    """`autobucketing.generate_buckets`: the powers of two from `min_length` (rounded down) on, below `max_length` rounded to one, then `max_length`.

    (128, 1024) gives 128, 256, 512, 1024, and (128, 600) gives 128, 256, 600. Raises ValueError unless 0 < min_length <= max_length.
    """
    if not 0 < min_length <= max_length:
        raise ValueError(f"buckets from {min_length} to {max_length} tokens: the first must be positive, and at most the second")
    if min_length == max_length:
        return [max_length]
    first, last = math.floor(math.log2(min_length)), round(math.log2(max_length))
    return [*(2**k for k in range(first, last) if 2**k < max_length), max_length]


def fitting(buckets: Sequence[int], length: int) -> int | None:
    """The smallest bucket of at least so many tokens; None if there is none. buckets: ascending."""
    return next((b for b in buckets if b >= length), None)


def power_above(length: int) -> int:
    """The smallest power of two of at least so many tokens."""
    return 1 << max(length - 1, 0).bit_length()
