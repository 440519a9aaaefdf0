"""PRNG keys of random ops: 64 bits made from a generator's seed and the op's offset in its stream, for XLA's own bit generator (Philox on CPUs and GPUs).

JAX's threefry keys cost a loop of their own for every draw, and two hashes for every key: a BERT with dropout spent half of its compile time on them. A key
here is one of JAX's kind "rbg": four words, of which the first two are the key of Philox and the last two its counter, which starts at 0.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from torch_bridge.lowerings.types import Array, Key

_KIND = "rbg"
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FACTORS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
"""Of SplitMix64, whose finalizer maps 64 bits to 64 bits one to one."""


def _mixed(x: Any) -> Any:
    x = x + _GOLDEN
    x = (x ^ (x >> np.uint64(30))) * _FACTORS[0]
    x = (x ^ (x >> np.uint64(27))) * _FACTORS[1]
    return x ^ (x >> np.uint64(31))


def _of_bits(bits: Array) -> Key:
    words = [bits.astype(jnp.uint32), (bits >> np.uint64(32)).astype(jnp.uint32), jnp.uint32(0), jnp.uint32(0)]
    return jax.random.wrap_key_data(jnp.stack(words), impl=_KIND)


def from_seed(seed: Array, offset: Array) -> Key:
    """The key of one draw. seed, offset: uint64 scalars, of the generator and of the op in its stream."""
    return _of_bits(bits_of(seed, offset))


def bits_of(seed: Any, offset: Any) -> Any:
    """The 64 bits of that key: uint64, of JAX or of numpy."""
    return _mixed(_mixed(seed) + offset)


def from_bits(bits: Array) -> Key:
    """The key that 64 random bits (a scalar of an integer dtype) stand for."""
    return _of_bits(_mixed(lax.bitcast_convert_type(bits, jnp.uint64)))


def fold_in(key: Key, index: Array | int) -> Key:
    """Another key for each index, a scalar."""
    if not is_counted(key):
        return jax.random.fold_in(key, index)
    low, high, *_ = jax.random.key_data(key).astype(jnp.uint64)
    return _of_bits(_mixed((high << np.uint64(32) | low) + _mixed(jnp.asarray(index).astype(jnp.uint64))))


def is_counted(key: Key) -> bool:
    """Whether it is of the kind that is made here; who exports a function may pass others."""
    return str(jax.random.key_impl(key)) == _KIND
