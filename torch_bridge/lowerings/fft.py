"""The three FFT kernels below torch.fft and stft.

`normalization` counts how often the result is divided by sqrt(n): 0 not at all, 1 once (ortho), 2 twice (by n), where n is
the number of signal points over all transformed dims. XLA transforms at most three dims at once; more are done in turns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax.numpy as jnp
import torch

from torch_bridge.lowerings.registry import lowering
from torch_bridge.lowerings.types import Array

aten = torch.ops.aten

_MOST_DIMS = 3


def _scaled(x: Array, points: int, normalization: int) -> Array:
    if normalization == 0 or points == 0:
        return x
    return x * (1 / math.sqrt(points) if normalization == 1 else 1 / points)


def _points(x: Array, dims: Sequence[int]) -> int:
    return math.prod(x.shape[d] for d in dims)


def _c2c(x: Array, dims: Sequence[int], forward: bool) -> Array:
    """Complex transform over `dims` without any scaling."""
    for start in range(0, len(dims), _MOST_DIMS):
        some = tuple(dims[start : start + _MOST_DIMS])
        x = jnp.fft.fftn(x, axes=some) if forward else jnp.fft.ifftn(x, axes=some, norm="forward")
    return x


@lowering(aten._fft_c2c.default)
def _fft_c2c(self: Array, dim: Sequence[int], normalization: int, forward: bool) -> Array:
    return _scaled(_c2c(self, dim, forward), _points(self, dim), normalization)


@lowering(aten._fft_r2c.default)
def _fft_r2c(self: Array, dim: Sequence[int], normalization: int, onesided: bool) -> Array:
    """The last of `dim` is the one that `onesided` cuts to n // 2 + 1."""
    if not dim:
        return self.astype(jnp.promote_types(self.dtype, jnp.complex64))
    if onesided:
        out = _c2c(jnp.fft.rfft(self, axis=dim[-1]), dim[:-1], True) if len(dim) > _MOST_DIMS else jnp.fft.rfftn(self, axes=tuple(dim))
    else:
        out = _c2c(self.astype(jnp.promote_types(self.dtype, jnp.complex64)), dim, True)
    return _scaled(out, _points(self, dim), normalization)


@lowering(aten._fft_c2r.default)
def _fft_c2r(self: Array, dim: Sequence[int], normalization: int, last_dim_size: int) -> Array:
    """Inverse transform to `last_dim_size` real points along the last of `dim`; its missing half is implied by symmetry."""
    if not dim:
        return self.real
    out = jnp.fft.irfft(_c2c(self, dim[:-1], False), n=last_dim_size, axis=dim[-1], norm="forward")
    return _scaled(out, _points(out, dim), normalization)
