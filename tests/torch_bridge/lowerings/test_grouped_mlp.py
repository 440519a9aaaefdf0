"""Gated MLPs of sorted rows against a loop over groups: values, gradients and their gradients, whatever the routing."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from torch_bridge.lowerings import grouped_mlp, grouped_tiles, torch_kernels

M, K, N, G = 96, 8, 12, 4
ROUTINGS = {
    "equal": [24, 24, 24, 24],
    "some more": [30, 20, 26, 20],
    "one has none": [40, 0, 31, 25],
    "one has all": [0, 0, 96, 0],
    "some are of nobody": [20, 24, 3, 22],
    "none": [0, 0, 0, 0],
}


def draw(dtype: Any = jnp.float32) -> list[jax.Array]:
    """Rows, gate and up, down, and a gradient."""
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.standard_normal(s) / 2, dtype) for s in ((M, K), (G, K, 2 * N), (G, N, K), (M, K))]


def by_hand(act: str, sizes: list[int], x: jax.Array, first: jax.Array, second: jax.Array) -> jax.Array:
    """A loop over groups, in float32."""
    parts, start = [], 0
    for g, size in enumerate(sizes):
        gate, up = jnp.split(x[start : start + size].astype(jnp.float32) @ first[g].astype(jnp.float32), 2, axis=-1)
        parts.append((grouped_mlp.ACTIVATIONS[act](gate) * up) @ second[g].astype(jnp.float32))
        start += size
    return jnp.concatenate([*parts, jnp.zeros((M - start, K))])


def ours(act: str, offs: jax.Array, mean: int = M // G) -> Any:
    return lambda *given: grouped_mlp.grouped_mlp(act, mean, *given, offs)[0]


def ends(sizes: list[int]) -> jax.Array:
    return jnp.asarray(np.cumsum(sizes), jnp.int32)


def close(found: Any, wanted: Any, tolerance: float = 1e-5) -> None:
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(np.asarray(a, np.float32), np.asarray(b, np.float32), rtol=tolerance, atol=tolerance)


def few_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have so few products go into tiles."""
    monkeypatch.setattr(grouped_tiles, "SMALL", 0)
    monkeypatch.setattr(grouped_tiles, "_MATRIX", 10)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="kernels of torch compute on the CPU")
@pytest.mark.core(keep=4)
@pytest.mark.parametrize(
    "sizes, act", [*((sizes, "silu") for sizes in ROUTINGS.values()), *((ROUTINGS["one has none"], act) for act in grouped_mlp.ACTIVATIONS)]
)
def test_kernels_of_torch(monkeypatch: pytest.MonkeyPatch, sizes: list[int], act: str) -> None:
    """The same, also where only the forward or only the backward pass is of a program that may call them."""
    few_are_many(monkeypatch)
    x, first, second, grad = draw()
    given = (x, first, second, ends(sizes))

    def forward(kernels: bool) -> Any:
        with torch_kernels.using(kernels):
            made = jax.jit(lambda *given: grouped_mlp.grouped_mlp(act, M // G, *given)).lower(*given)
        assert ("torch_bridge_kernel" in made.as_text()) == kernels
        return made.compile()(*given)

    def backward(kernels: bool, kept: jax.Array) -> Any:
        with torch_kernels.using(kernels):
            made = jax.jit(lambda *given: grouped_mlp.gradients(act, M // G, *given)).lower(grad, *given, kept)
        assert ("torch_bridge_kernel" in made.as_text()) == kernels
        return made.compile()(grad, *given, kept)

    ways = (True, False)
    outs, kept = zip(*map(forward, ways), strict=True)
    wanted, wanted_back = jax.vjp(lambda *given: by_hand(act, sizes, *given), x, first, second)
    for out in outs:
        close([out], [wanted])
    for of_forward in kept:
        assert np.isfinite(of_forward).all()
        for way in ways:
            close(backward(way, of_forward), wanted_back(grad))


@pytest.fixture(params=["tiles", "blocks alone"])
def small(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "tiles":
        few_are_many(monkeypatch)


@pytest.mark.thorough(keep=13)
@pytest.mark.core(keep=4)
@pytest.mark.parametrize("mean", [M // G, 4])
@pytest.mark.parametrize("sizes", ROUTINGS.values(), ids=list(ROUTINGS))
def test_numbers_and_gradients(small: None, sizes: list[int], mean: int) -> None:
    x, first, second, grad = draw()
    out, back = jax.vjp(jax.jit(ours("silu", ends(sizes), mean)), x, first, second)
    wanted, wanted_back = jax.vjp(lambda *given: by_hand("silu", sizes, *given), x, first, second)
    close([out, *back(grad)], [wanted, *wanted_back(grad)])


@pytest.mark.core(keep=2)
@pytest.mark.parametrize("act", grouped_mlp.ACTIVATIONS)
def test_activations(act: str) -> None:
    x, first, second, grad = draw()
    sizes = ROUTINGS["some more"]
    out, back = jax.vjp(ours(act, ends(sizes)), x, first, second)
    wanted, wanted_back = jax.vjp(lambda *given: by_hand(act, sizes, *given), x, first, second)
    close([out, *back(grad)], [wanted, *wanted_back(grad)])


def test_bfloat16_adds_up_in_float32(small: None) -> None:
    x, first, second, grad = draw(jnp.bfloat16)
    sizes = ROUTINGS["some more"]
    out, back = jax.vjp(ours("silu", ends(sizes)), x, first, second)
    found = [out, *back(grad)]
    assert {a.dtype for a in found} == {jnp.dtype(jnp.bfloat16)}
    wanted, wanted_back = jax.vjp(lambda *given: by_hand("silu", sizes, *given), x, first, second)
    close(found, [wanted, *wanted_back(grad.astype(jnp.float32))], 3e-2)


def test_gradients_of_gradients_and_vmap() -> None:
    x, first, second, _ = draw()
    both = [ROUTINGS["some more"], ROUTINGS["some are of nobody"]]

    def steepness(fn: Any) -> Any:
        def of(*given: jax.Array) -> jax.Array:
            return sum((g**2).sum() for g in jax.grad(lambda *a: (fn(*a) ** 2).sum(), (0, 1, 2))(*given))

        return jax.grad(of, (0, 1, 2))

    found = jax.vmap(lambda offs: steepness(ours("silu", offs))(x, first, second))(jnp.stack([ends(s) for s in both]))
    for k, sizes in enumerate(both):
        wanted = steepness(lambda *given, sizes=sizes: by_hand("silu", sizes, *given))(x, first, second)
        close([a[k] for a in found], wanted, 2e-3)


def test_ragged_forms_agree() -> None:
    x, first, second, grad = draw()
    offs, mean = ends(ROUTINGS["some more"]), 30
    out, kept = grouped_mlp._forward_ragged("silu", mean, x, first, second, offs)
    assert kept.shape == (grouped_mlp.kept_rows(M, G, mean), 2 * N) == (128, 2 * N)
    default, its_kept = grouped_mlp._forward_default("silu", mean, x, first, second, offs)
    assert its_kept.shape == kept.shape
    close([out], [default])
    close(
        grouped_mlp._backward_ragged("silu", mean, grad, x, first, second, offs, kept),
        grouped_mlp._backward_default("silu", mean, grad, x, first, second, offs, its_kept),
    )


def test_no_rows() -> None:
    x, first, second, _ = draw()
    out, back = jax.vjp(ours("silu", ends([0, 0, 0, 0])), x[:0], first, second)
    grads = back(out)
    assert out.shape == (0, K) and not any(g.any() for g in grads)


@pytest.mark.parametrize("groups", [4, 64])
def test_products_that_are_compiled(groups: int) -> None:
    """As many for any number of groups: tiles and blocks, the latter with the first product again for the gradients."""
    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((1024, 256), (groups, 256, 512), (groups, 256, 256))]
    ends_ = jax.ShapeDtypeStruct((groups,), jnp.int32)

    def loss(x: jax.Array, first: jax.Array, second: jax.Array, offs: jax.Array) -> jax.Array:
        return (ours("silu", offs, 1024 // groups)(x, first, second) ** 2).sum()

    text = jax.jit(jax.grad(loss, (0, 1, 2))).lower(*shapes, ends_).as_text()
    assert text.count("dot_general") == 2 * 2 + 4 + 5
