from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from tests.torch_bridge.lowerings.batches import together
from tests.torch_bridge.lowerings.parity import check
from torch_bridge import _compat
from torch_bridge.lowerings import lookup, random_keys
from torch_bridge.lowerings.dropout import keep_mask

aten = torch.ops.aten
DROPOUT = lookup(aten.native_dropout.default)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.999])
@pytest.mark.parametrize("train", [True, None])
def test_share_and_scale(p, train):
    assert DROPOUT.rng
    with _compat.enable_x64():
        out, keep = DROPOUT.fn(jnp.full((100_000,), 3.0, jnp.float32), p, train, key=jax.random.key(0))
    assert out.dtype == jnp.float32 and keep.dtype == jnp.bool_
    assert abs(float(keep.mean()) - (1 - p)) < 5 * (p * (1 - p) / 100_000) ** 0.5
    assert jnp.allclose(out[keep], 3 / (1 - p)) and (out[~keep] == 0).all()


def test_corners():
    x = jnp.ones((7,), jnp.bfloat16)
    for p, train, kept in [(0.0, True, True), (1.0, True, False), (0.5, False, True)]:
        out, keep = DROPOUT.fn(x, p, train, key=jax.random.key(0))
        assert out.dtype == x.dtype and (keep == kept).all() and (out == (1 if kept else 0)).all()


def test_keys():
    masks = [DROPOUT.fn(jnp.ones(64), 0.5, True, key=jax.random.key(i))[1] for i in (0, 0, 1)]
    assert (masks[0] == masks[1]).all() and (masks[0] != masks[2]).any()


@together
def test_backward():
    g, mask = torch.randn(3, 4), torch.rand(3, 4) > 0.5
    check(aten.native_dropout_backward.default, g, mask, 2.0)
    check(aten.native_dropout_backward.default, g.bfloat16(), mask, 1.25)
    check(aten.native_dropout_backward.default, torch.tensor([float("nan"), float("inf"), 1.0]), torch.tensor([False, False, True]), 2.0)


COUNT = 1 << 20


def _centred(seed: int, offset: int, p: float) -> np.ndarray:
    """A mask's elements less their mean, over their standard deviation."""
    with _compat.enable_x64():
        key = random_keys.from_seed(jnp.uint64(seed), jnp.uint64(offset))
        mask = np.asarray(keep_mask(key, p, (COUNT // 512, 512))).reshape(-1)
    return (mask - (1 - p)) / (p * (1 - p)) ** 0.5


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_masks_are_independent(p):
    """Of neighbours, of rows and columns, of elements whose numbers differ in one bit, and of draws that follow each other: each of some 100 sums of products
    is a normal deviate, so one in 10 million of these tests would fail by chance."""
    found, before = [], None
    for offset in range(3):
        x = _centred(7, offset, p)
        found += [x.sum()] + [(x[:-lag] * x[lag:]).sum() for lag in (1, 2, 3, 8, 64, 511, 512, 513, 1024, 1 << 16)]
        found += [(x * x[np.arange(COUNT) ^ (1 << bit)]).sum() / 2**0.5 for bit in range(20)]
        found += [(x.reshape(shape).sum(1) ** 2 - shape[1]).sum() / (2 * shape[1]) ** 0.5 for shape in [(-1, 64), (-1, 512)]]
        if before is not None:
            found += [(x * np.roll(before, lag)).sum() for lag in (0, 1, 512)]
            found += [(x * before[np.arange(COUNT) ^ (1 << bit)]).sum() for bit in range(20)]
        before = x
    z = np.array(found) / COUNT**0.5
    assert len(z) > 100 and abs(z).max() < 6.5 and 0.8 < (z**2).mean() < 1.3


def test_a_mask_costs_no_memory_and_no_loop():
    """XLA computes it where it is read."""

    def step(bits, x, grad):
        mask = keep_mask(random_keys.from_bits(bits), 0.1, x.shape)
        return jnp.where(mask, x, 0), jnp.where(mask, grad, 0)

    with _compat.enable_x64():
        big = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)
        compiled = jax.jit(step).lower(jax.ShapeDtypeStruct((), jnp.int64), big, big).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 4096
    assert "while" not in compiled.as_text()


def test_a_mask_of_other_shapes_and_under_vmap():
    """Elements have their numbers in row-major order, whatever the shape; each key of a batch has a mask of its own."""
    with _compat.enable_x64():
        keys = jax.vmap(random_keys.from_bits)(jnp.arange(3))
        masks = jax.vmap(lambda key: keep_mask(key, 0.5, (4, 6)))(keys)
        assert all((masks[k] == keep_mask(keys[k], 0.5, (24,)).reshape(4, 6)).all() for k in range(3))
        assert (masks[0] != masks[1]).any() and keep_mask(keys[0], 0.5, ()).shape == () and keep_mask(keys[0], 0.5, (0, 3)).shape == (0, 3)
