from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from tests.torch_bridge.lowerings.batches import together
from tests.torch_bridge.lowerings.nn_checks import check_gradients
from tests.torch_bridge.lowerings.parity import check
from torch_bridge.lowerings import grouped_matmul, lookup

aten = torch.ops.aten
torch.manual_seed(0)
SIZES = [[8, 8, 8], [24, 0, 0], [0, 0, 24], [1, 22, 1], [0, 13, 11], [200, 3, 97]]


def offsets(sizes: list[int]) -> torch.Tensor:
    return torch.tensor(sizes).cumsum(0).to(torch.int32)


@pytest.mark.thorough(keep=6)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@together
def test_forms(sizes, dtype):
    m, offs = sum(sizes), offsets(sizes)
    x, w = torch.randn(m, 16).to(dtype), torch.randn(3, 16, 8).to(dtype)
    check(aten._grouped_mm.default, x, w, offs)
    check(aten._grouped_mm.default, torch.randn(3, 8, 16).to(dtype), torch.randn(16, m).to(dtype), offs) if m % 8 == 0 else None
    check(aten._grouped_mm.default, torch.randn(16, m).to(dtype), torch.randn(m, 8).to(dtype), offs) if m % 8 == 0 else None
    check(aten._grouped_mm.default, torch.randn(3, 8, 16).to(dtype), w)


@pytest.mark.thorough(keep=3)
@pytest.mark.parametrize("sizes", SIZES[:5])
@together
def test_gradients(sizes):
    offs = offsets(sizes)
    check_gradients(aten._grouped_mm.default, torch.randn(24, 16), torch.randn(3, 16, 8), offs)
    check_gradients(aten._grouped_mm.default, torch.randn(3, 8, 16), torch.randn(16, 24), offs)
    check_gradients(aten._grouped_mm.default, torch.randn(16, 24), torch.randn(24, 8), offs)
    check_gradients(aten._grouped_mm.default, torch.randn(3, 8, 16), torch.randn(3, 16, 8))


def test_rows_behind_the_last_group_give_zeros():
    out = grouped_matmul.grouped_rows(jnp.ones((20, 4)), jnp.ones((2, 4, 3)), jnp.array([3, 9]))
    assert (out[:9] == 4).all() and (out[9:] == 0).all()
    grad = grouped_matmul.grouped_outer(jnp.ones((20, 4)), jnp.ones((20, 3)), jnp.array([3, 9]))
    assert (grad[0] == 3).all() and (grad[1] == 6).all()


@pytest.mark.parametrize("m", [1, 64, 131, 299])
def test_every_row_has_its_block(m):
    rng = np.random.default_rng(m)
    b = grouped_matmul._block_rows(m, 7)
    blocks = jax.jit(lambda offs: grouped_matmul._blocks(offs, m, b))
    for _ in range(6):
        sizes = rng.multinomial(m, rng.dirichlet(np.full(7, 0.3)))
        offs = np.cumsum(sizes)
        seen = []
        for group, start, end in zip(*(np.asarray(a) for a in blocks(jnp.asarray(offs))), strict=True):
            rows = range(start, min(start + b, end))
            assert all((offs[group] - sizes[group]) <= r < offs[group] for r in rows)
            seen += rows
        assert seen == list(range(m))


def test_bias_is_refused():
    with pytest.raises(NotImplementedError, match="_grouped_mm with a bias"):
        lookup(aten._grouped_mm.default).fn(jnp.ones((4, 4)), jnp.ones((1, 4, 4)), jnp.array([4]), jnp.ones(4))


def test_tpu_forms_agree():
    offs = jnp.array([3, 3, 20])
    x, w, y = (jax.random.normal(jax.random.key(i), s) for i, s in enumerate([(20, 4), (3, 4, 5), (20, 5)]))
    np.testing.assert_allclose(grouped_matmul._rows_tpu(x, w, offs), grouped_matmul._rows_by_blocks(x, w, offs), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(grouped_matmul._outer_tpu(x, y, offs), grouped_matmul._outer_by_blocks(x, y, offs), rtol=1e-5, atol=1e-5)
