from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax import export

from tests.torch_bridge.lowerings.batches import together
from tests.torch_bridge.lowerings.nn_checks import check_gradients
from tests.torch_bridge.lowerings.parity import check
from torch_bridge.lowerings import grouped_matmul, grouped_tiles, lookup

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


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(("k", "n"), [(4, 12), (12, 4), (4, 2), (2, 4), (6, 8)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_rows_of_16_bytes(dtype: torch.dtype, k: int, n: int, turned: bool) -> None:
    """As in torch's CPU kernel: rows of 4 float32 numbers will do, or of 8 of two bytes; columns are rows where a matrix lies turned."""
    x, offs = torch.randn(9, k).to(dtype), offsets([4, 0, 5])
    w = torch.randn(3, n, k).to(dtype).transpose(1, 2) if turned else torch.randn(3, k, n).to(dtype)
    if all(size * dtype.itemsize % 16 == 0 for size in (k, k if turned else n)):
        torch.testing.assert_close(
            torch._grouped_mm(x.to("xla"), w.to("xla"), offs=offs.to("xla")).cpu(), torch._grouped_mm(x, w, offs=offs)
        )
        return
    with pytest.raises(RuntimeError, match="strides should be multiple of 16 bytes"):
        torch._grouped_mm(x, w, offs=offs)
    with pytest.raises(RuntimeError, match="stride along . dim to be multiple of 16 bytes"):
        torch._grouped_mm(x.to("xla"), w.to("xla"), offs=offs.to("xla"))


@pytest.mark.parametrize(
    ("dtypes", "out_dtype", "text"),
    [
        (
            (torch.float32, torch.bfloat16),
            None,
            "_grouped_mm: expected all operands to have the same dtype, but got torch.float32, torch.bfloat16",
        ),
        ((torch.int32, torch.int32), None, "_grouped_mm: expected matrices of floats, got torch.int32"),
        ((torch.float32, torch.float32), torch.bfloat16, "out_dtype=torch.bfloat16 must be the matrices' dtype, torch.float32"),
    ],
)
def test_dtypes_that_torch_refuses(dtypes: tuple[torch.dtype, torch.dtype], out_dtype: torch.dtype | None, text: str) -> None:
    x, w, offs = torch.ones(8, 8, dtype=dtypes[0]), torch.ones(2, 8, 8, dtype=dtypes[1]), offsets([3, 5])
    with pytest.raises(RuntimeError):
        torch._grouped_mm(x, w, offs=offs, out_dtype=out_dtype)
    with pytest.raises(RuntimeError, match=text):
        torch._grouped_mm(x.to("xla"), w.to("xla"), offs=offs.to("xla"), out_dtype=out_dtype)


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


@pytest.mark.parametrize("ends", [[0, 0], [20, 20], [1, 20]])
def test_the_last_block_reaches_no_further_than_its_rows(ends):
    out = grouped_matmul.grouped_rows(jnp.ones((20, 4)), jnp.ones((2, 4, 3)), jnp.array(ends))
    np.testing.assert_array_equal(out[:, 0], np.where(np.arange(20) < ends[-1], 4.0, 0.0))


@pytest.mark.parametrize("m", [1, 64, 131, 299])
def test_every_row_has_its_block(m):
    rng = np.random.default_rng(m)
    b = grouped_tiles.block_rows(m, 7)
    blocks = jax.jit(lambda offs: grouped_tiles.blocks(offs, m, b))
    for _ in range(6):
        sizes = rng.multinomial(m, rng.dirichlet(np.full(7, 0.3)))
        offs = np.cumsum(sizes)
        seen = []
        *found, count = (np.asarray(a) for a in blocks(jnp.asarray(offs)))
        for group, start, end in zip(*(a[:count] for a in found), strict=True):
            assert start < end
            rows = range(start, min(start + b, end))
            assert all((offs[group] - sizes[group]) <= r < offs[group] for r in rows)
            seen += rows
        assert seen == list(range(m))
        assert all((a[count:] == m).all() for a in found[1:])


@pytest.mark.parametrize("used", [0, 1, 65, 200])
def test_blocks_end_with_the_rows_that_are_used(used):
    m, b = 200, grouped_tiles.block_rows(200, 4)
    sizes = np.array([used // 3, 0, used - used // 3, 0])
    *_, count = grouped_tiles.blocks(jnp.asarray(np.cumsum(sizes)), m, b)
    assert count == sum(-(-size // b) for size in sizes)


def test_loops_inside_of_vmap_scan_and_gradients_of_gradients():
    """The loop's end is a value: it may differ along a batch, and nothing differentiates through it."""
    x, w = (jax.random.normal(jax.random.key(i), s) / 2 for i, s in enumerate([(2, 20, 4), (2, 3, 4, 4)]))
    offs = jnp.array([[3, 3, 20], [0, 5, 9]])

    def by_hand(x, w, offs):
        row = jnp.arange(20)
        group = jnp.minimum(jnp.searchsorted(offs, row, side="right"), 2)
        return jnp.where((row < offs[-1])[:, None], jnp.einsum("mk,mkn->mn", x, w[group]), 0.0)

    def slope(fn):
        def loss(x, w, offs):
            return (fn(jnp.tanh(fn(x, w, offs)), w, offs) ** 2).sum()

        def steepness(x, w, offs):
            return sum((g**2).sum() for g in jax.grad(loss, (0, 1))(x, w, offs))

        return jax.vmap(jax.value_and_grad(steepness, (0, 1)))(x, w, offs)

    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), slope(grouped_matmul.grouped_rows), slope(by_hand))
    _, seen = jax.lax.scan(lambda c, row: (c, grouped_matmul.grouped_rows(x[0], w[0], row)), 0, offs)
    np.testing.assert_allclose(seen[1], by_hand(x[0], w[0], offs[1]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(2, 1), (1, 2)])
def test_vmap_within_vmap(shape):
    """As ranks along two mesh axes run on one device, for every platform."""
    x, w = (jax.random.normal(jax.random.key(i), s) for i, s in enumerate([(2, 6, 4), (2, 3, 4, 4)]))
    offs = jnp.array([[2, 3, 6], [0, 5, 5]], jnp.int32)
    fn = jax.jit(jax.vmap(jax.vmap(grouped_matmul.grouped_rows)))
    given = [a.reshape(*shape, *a.shape[1:]) for a in (x, w, offs)]
    export.export(fn, platforms=("cpu", "cuda", "tpu"))(*given)
    for ragged in (grouped_matmul.grouped_rows, functools.partial(grouped_matmul.ragged_rows, False)):
        found = jax.vmap(jax.vmap(ragged))(*given).reshape(2, 6, 4)
        for k in range(2):
            np.testing.assert_allclose(found[k], grouped_matmul.grouped_rows(x[k], w[k], offs[k]), rtol=1e-5, atol=1e-5)


def test_bias_is_refused():
    with pytest.raises(NotImplementedError, match="_grouped_mm with a bias"):
        lookup(aten._grouped_mm.default).fn(jnp.ones((4, 4)), jnp.ones((1, 4, 4)), jnp.array([4]), jnp.ones(4))


def test_tpu_forms_agree():
    offs = jnp.array([3, 3, 20])
    x, w, y = (jax.random.normal(jax.random.key(i), s) for i, s in enumerate([(20, 4), (3, 4, 5), (20, 5)]))
    for transposed, rows in ((False, x), (True, y)):
        forms = (form(transposed, rows, w, offs) for form in (grouped_matmul.ragged_rows, grouped_matmul._rows_default))
        np.testing.assert_allclose(*forms, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(grouped_matmul.ragged_outer(x, y, offs), grouped_matmul._outer_default(x, y, offs), rtol=1e-5, atol=1e-5)
