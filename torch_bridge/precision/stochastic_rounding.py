"""Stochastic rounding from float32 to bfloat16 and float16, and the stream of random numbers behind it.

A number between two neighbours of the narrow format becomes the upper one with a probability equal to its distance from the lower one in units
of their gap, so the expected result is the number itself. Numbers that the format has stay as they are; so do infinities and NaN. Beyond the
largest finite number, rounding is to nearest.

Random bits are a hash of the element's index, the place in the program and two words that change with every execution. They are cheap to compute and to
compile, and fuse with the conversion. Every rank draws the same, so ranks that share a value go on sharing it.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

HALF = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))
"""The dtypes that are rounded to."""

_DROPPED_BITS = {HALF[0]: 16, HALF[1]: 13}
_UINT32 = jnp.uint32


def stochastic(x: Any, dtype: Any, bits: Any) -> Any:
    """A float32 array as bfloat16 or float16, rounded stochastically. bits: random uint32, one for each element."""
    dtype = jnp.dtype(dtype)
    info = jnp.finfo(dtype)
    rounded = _to_multiple(x, _DROPPED_BITS[dtype], bits)
    if dtype == jnp.float16:  # its subnormal numbers are 2**-24 apart, whatever their exponent
        rounded = jnp.where(jnp.abs(x) < info.smallest_normal.astype(jnp.float32), _to_fixed_point(x, 2.0**24, bits), rounded)
    plain = jnp.abs(x) <= info.max.astype(jnp.float32)
    return jnp.where(plain, rounded, x).astype(dtype)


@functools.partial(jax.jit, static_argnames="dtype", inline=True)
def drawn(x: Any, words: tuple[Any, Any], place: Any, dtype: Any) -> Any:
    """`stochastic` with the bits of a place; traced once for each shape and dtype."""
    return stochastic(x, dtype, random_bits(x.shape, words, place))


def _to_multiple(x: Any, dropped: int, bits: Any) -> Any:
    """Add a random number below the weight of the last kept bit and cut what is dropped: a carry rounds up, also into the exponent."""
    mask = np.uint32((1 << dropped) - 1)
    raw = lax.bitcast_convert_type(x, _UINT32) + (bits >> np.uint32(32 - dropped))
    return lax.bitcast_convert_type(raw & ~mask, jnp.float32)


def _to_fixed_point(x: Any, scale: float, bits: Any) -> Any:
    scaled = x * np.float32(scale)
    below = jnp.floor(scaled)
    chance = (bits >> np.uint32(8)).astype(jnp.float32) * np.float32(2.0**-24)
    return jnp.copysign((below + (chance < scaled - below).astype(jnp.float32)) * np.float32(1 / scale), x)


def nearest(x: Any, exponent: int, mantissa: int) -> Any:
    """A float32 array with the values of a format of so many exponent and mantissa bits, its subnormal numbers too; infinite beyond its largest."""
    rounded = lax.reduce_precision(x, exponent, mantissa)
    if exponent == 8:  # float32's own range
        return rounded
    lowest = 2 - 2 ** (exponent - 1)
    step = np.float32(2.0 ** (lowest - mantissa))
    return jnp.where(jnp.abs(x) < np.float32(2.0**lowest), lax.round(x / step, lax.RoundingMethod.TO_NEAREST_EVEN) * step, rounded)


def random_bits(shape: tuple[int, ...], words: tuple[Any, Any], place: Any) -> Any:
    """uint32 bits, one for each element; the upper ones are the best. words: two uint32 of this execution; place: one of this rounding in the program.

    As few operations as will do: a program has one of these for every rounding, and the time to compile it grows with them. The numbers of all places are
    one sequence, which they enter as far from one another as can be (multiples of the golden ratio), and each goes on with a constant of its own.
    """
    index = lax.iota(_UINT32, math.prod(shape)).reshape(shape)
    x = (index + (words[0] + place)) * np.uint32(0x7FEB352D)
    x = x ^ (x >> np.uint32(16)) ^ (words[1] ^ place)
    return x * np.uint32(0x846CA68B)


PLACES = 512
"""How many numbers a program has to tell its roundings apart."""


def place_numbers() -> list[np.ndarray]:
    """What tells the roundings of a program apart, as inputs of the program: `PLACES` scalars.

    As constants of the program they would make every rounding another kernel. XLA compiles kernels that are equal once, so with inputs the roundings of
    equal layers and parameters share theirs.
    """
    return [np.array(k * 0x9E3779B1 & 0xFFFFFFFF, np.uint32) for k in range(1, PLACES + 1)]


def place_of(number: int, numbers: Any) -> Any:
    """The number of the n-th rounding of a program. numbers: `place_numbers`, as its inputs; what exceeds them is a constant."""
    again, at = divmod(number, PLACES)
    return numbers[at] if not again else numbers[at] ^ np.uint32(again * 0xC2B2AE35 & 0xFFFFFFFF)


def mix(x: Any) -> Any:
    """A bijection of uint32 in which every input bit changes every output bit with probability one half (MurmurHash3's last step)."""
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return x ^ (x >> np.uint32(16))


class Stream:
    """Two random words for each execution: a function of the seed and of how many executions there were before."""

    def __init__(self) -> None:
        self.seed: int | None = None
        self.count = 0

    def take(self, seed: int) -> np.ndarray:
        """The next words; a seed other than the last one starts its own sequence from the beginning."""
        if seed != self.seed:
            self.seed, self.count = seed, 0
        self.count += 1
        return np.random.SeedSequence((seed, self.count)).generate_state(2, np.uint32)

    @property
    def state(self) -> tuple[int | None, int]:
        """The seed and how many executions there were, to go on from (`state = ...`)."""
        return self.seed, self.count

    @state.setter
    def state(self, state: tuple[int | None, int]) -> None:
        self.seed, self.count = state


STREAM = Stream()


def restart() -> None:
    """Start the sequence of random numbers again, as in a new process."""
    STREAM.seed = None
