"""FFT lowerings against eager torch."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import torch_bridge.lowerings as lowerings
from tests.torch_bridge.lowerings.batches import together
from tests.torch_bridge.lowerings.parity import check, to_jax
from torch_bridge import _compat

aten = torch.ops.aten
R, C, D = torch.float32, torch.complex64, torch.float64


def rand(*shape, dtype=R, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


CASES = [
    (aten._fft_r2c.default, rand(5), [0], 0, True),
    (aten._fft_r2c.default, rand(2, 6), [1], 1, True),
    (aten._fft_r2c.default, rand(2, 6), [1], 2, False),
    (aten._fft_r2c.default, rand(4, 5, 6), [0, 2], 1, True),
    (aten._fft_r2c.default, rand(4, 5, 6), [2, 0], 2, True),
    (aten._fft_r2c.default, rand(4, 5, 6), [2, 0, 1], 0, False),
    (aten._fft_r2c.default, rand(2, 3, 4, 3, 2), [0, 1, 2, 3], 1, True),
    (aten._fft_r2c.default, rand(4, 6, dtype=D), [0, 1], 0, True),
    (aten._fft_r2c.default, rand(1), [0], 2, True),
    (aten._fft_c2c.default, rand(7, dtype=C), [0], 0, True),
    (aten._fft_c2c.default, rand(7, dtype=C), [0], 2, False),
    (aten._fft_c2c.default, rand(3, 4, dtype=C), [1], 1, False),
    (aten._fft_c2c.default, rand(3, 4, dtype=C), [0, 1], 1, True),
    (aten._fft_c2c.default, rand(3, 4, dtype=C), [], 0, True),
    (aten._fft_c2c.default, rand(2, 3, 4, 3, 2, dtype=C), [0, 1, 2, 4], 2, False),
    (aten._fft_c2r.default, rand(4, dtype=C), [0], 0, 6),
    (aten._fft_c2r.default, rand(4, dtype=C), [0], 2, 7),
    (aten._fft_c2r.default, rand(3, 4, dtype=C), [0, 1], 1, 6),
    (aten._fft_c2r.default, rand(4, 3, 4, dtype=C), [2, 0], 2, 7),
    (aten._fft_c2r.default, rand(2, 3, 2, 3, dtype=C), [0, 1, 2, 3], 1, 4),
    (aten._fft_c2r.default, rand(3, 4, dtype=torch.complex128), [1], 0, 6),
    (aten._fft_c2r.default, rand(1, dtype=C), [0], 2, 1),
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c[0].name()[6:]}{list(c[1].shape)}{c[2:]}")
@together
def test_values(case):
    check(*case, rtol=1e-5, atol=2e-5)


def test_empty_batches():
    """Eager torch's MKL raises here; an empty result of the right shape is the natural reading."""
    with _compat.enable_x64():
        assert lowerings.lookup(aten._fft_r2c.default).fn(jnp.zeros((0, 4)), [1], 0, True).shape == (0, 3)
        assert lowerings.lookup(aten._fft_c2c.default).fn(jnp.zeros((0, 4), jnp.complex64), [1], 2, True).shape == (0, 4)


@pytest.mark.parametrize("norm", ["backward", "ortho", "forward"])
def test_gradients(norm):
    x = rand(4, 6).requires_grad_()
    weight = rand(4, 6, seed=1)
    (torch.fft.irfft2(torch.fft.rfft2(x, norm=norm) ** 2, s=(4, 6), norm=norm) * weight).sum().backward()
    code = {"backward": (0, 2), "ortho": (1, 1), "forward": (2, 0)}[norm]
    r2c, c2r = (lowerings.lookup(op).fn for op in (aten._fft_r2c.default, aten._fft_c2r.default))

    def loss(v):
        return (c2r(r2c(v, [0, 1], code[0], True) ** 2, [0, 1], code[1], 6) * to_jax(weight)).sum()

    with _compat.enable_x64():
        got = jax.grad(loss)(to_jax(x))
    np.testing.assert_allclose(np.asarray(got), x.grad.numpy(), rtol=1e-4, atol=1e-4)
    assert got.dtype == jnp.float32
