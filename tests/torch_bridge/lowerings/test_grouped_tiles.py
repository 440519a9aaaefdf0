"""Groups of much the same size are multiplied at once, others block by block, and the numbers are the same."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from torch_bridge.lowerings import grouped_matmul, grouped_tiles

M, K, N = 256, 8, 12
ROUTINGS = {
    "equal": ([64, 64, 64, 64], True),
    "one row more": ([65, 63, 64, 64], True),
    "nearly equal": ([66, 63, 62, 65], True),
    "all but one": ([73, 72, 0, 79], True),
    "few are of nobody": ([61, 40, 44, 72], True),
    "one has half": ([128, 48, 40, 40], True),
    "one has all": ([0, 0, 256, 0], False),
    "most are of nobody": ([0, 1, 0, 0], False),
    "none": ([0, 0, 0, 0], False),
}
"""Groups, and whether tiles pay."""


def by_hand(x: np.ndarray, w: np.ndarray, sizes: list[int]) -> np.ndarray:
    ends = np.cumsum(sizes)
    parts = [x[end - size : end] @ w[g] for g, (end, size) in enumerate(zip(ends, sizes, strict=True))]
    return np.concatenate([*parts, np.zeros((len(x) - ends[-1], w.shape[2]))])


@pytest.mark.parametrize("name", ROUTINGS)
def test_tiles_are_used_where_they_pay(name: str) -> None:
    groups, pays = ROUTINGS[name]
    c, b = grouped_tiles.tile_rows(M, 4), grouped_tiles.block_rows(M, 4)
    assert bool(grouped_tiles.fits(jnp.asarray(np.cumsum(groups), jnp.int32), c, b)) == pays


@pytest.mark.parametrize("m", [64, 1024, 8192])
@pytest.mark.parametrize("g", [4, 8, 64])
def test_no_routing_costs_much_more_than_its_rows(m: int, g: int) -> None:
    """In rows that are multiplied: blocks alone are always a choice."""
    rng = np.random.default_rng(m + g)
    c, b = grouped_tiles.tile_rows(m, g), grouped_tiles.block_rows(m, g)
    for _ in range(10):
        groups = rng.multinomial(rng.integers(1, m + 1), rng.dirichlet(np.full(g, rng.choice([0.1, 1, 100]))))
        used = c if grouped_tiles.fits(jnp.asarray(np.cumsum(groups), jnp.int32), c, b) else 0
        rows = g * used + np.ceil(np.maximum(groups - used, 0) / b).sum() * b
        assert rows <= np.ceil(groups / b).sum() * (b + 40) <= 4 * (groups.sum() + b * (groups > 0).sum())


def test_sizes() -> None:
    """The mean is that of all groups, also where rows of others are among them."""
    assert (grouped_tiles.tile_rows(1024, 8), grouped_tiles.tile_rows(1024, 4, 128), grouped_tiles.tile_rows(8, 64)) == (136, 136, 8)
    assert (grouped_tiles.block_rows(1024, 8), grouped_tiles.block_rows(1024, 4, 128), grouped_tiles.block_rows(8, 64)) == (32, 32, 16)


@pytest.mark.thorough(keep=10)
@pytest.mark.core(keep=4)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("name", ROUTINGS)
def test_numbers_and_gradients(monkeypatch: pytest.MonkeyPatch, name: str, dtype: jnp.dtype) -> None:
    monkeypatch.setattr(grouped_tiles, "SMALL", 0)
    sizes, _ = ROUTINGS[name]
    offs = jnp.asarray(np.cumsum(sizes), jnp.int32)
    rng = np.random.default_rng(1)
    x, w, g = (rng.standard_normal(shape).astype(np.float32) for shape in ((M, K), (4, K, N), (M, N)))
    given = (jnp.asarray(a, dtype) for a in (x, w, g))
    x, w, g = (np.asarray(jnp.asarray(a, dtype), np.float32) for a in (x, w, g))
    out, back = jax.vjp(lambda x, w: grouped_matmul.grouped_rows(x, w, offs), *(next(given), next(given)))
    grad_x, grad_w = back(next(given))
    assert {out.dtype, grad_x.dtype, grad_w.dtype} == {jnp.dtype(dtype)}
    ends = np.cumsum(sizes)
    outer = np.stack([x[end - size : end].T @ g[end - size : end] for end, size in zip(ends, sizes, strict=True)])
    tolerance = 1e-5 if dtype == jnp.float32 else 1e-2
    for found, wanted in ((out, by_hand(x, w, sizes)), (grad_x, by_hand(g, w.swapaxes(1, 2), sizes)), (grad_w, outer)):
        np.testing.assert_allclose(np.asarray(found, np.float32), wanted, rtol=tolerance, atol=10 * tolerance)


def test_small_products_are_a_loop_alone() -> None:
    """Tiles are one more product to compile."""

    def products(k: int) -> int:
        shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((M, k), (4, k, k))]
        return jax.jit(grouped_matmul.grouped_rows).lower(*shapes, jax.ShapeDtypeStruct((4,), jnp.int32)).as_text().count("dot_general")

    assert (products(64), products(512)) == (1, 2)
