from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
import torch

from tests.torch_bridge.lowerings.batches import together
from tests.torch_bridge.lowerings.parity import check
from torch_bridge import _compat
from torch_bridge.lowerings import lookup

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
