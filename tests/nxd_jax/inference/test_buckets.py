"""Lengths that programs are traced for."""

from __future__ import annotations

import pytest

from nxd_jax.inference.buckets import fitting, generate_buckets, power_above


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (128, 1024, [128, 256, 512, 1024]),
        (128, 600, [128, 256, 600]),
        (128, 768, [128, 256, 512, 768]),
        (128, 128, [128]),
        (100, 128, [64, 128]),
        (1, 3, [1, 2, 3]),
        (128, 130, [130]),
    ],
)
def test_generate_buckets(low: int, high: int, expected: list[int]) -> None:
    assert generate_buckets(low, high) == expected


@pytest.mark.parametrize(("low", "high"), [(0, 4), (5, 4)])
def test_what_is_refused(low: int, high: int) -> None:
    with pytest.raises(ValueError, match=f"buckets from {low} to {high} tokens"):
        generate_buckets(low, high)


def test_the_smallest_that_fits() -> None:
    assert [fitting((8, 16), n) for n in (1, 8, 9, 16, 17)] == [8, 8, 16, 16, None]
    assert [power_above(n) for n in (0, 1, 2, 3, 64, 65)] == [1, 1, 2, 4, 64, 128]
