"""Keys of random ops: each seed, offset and index its own; a mask that is drawn in parts is the one that is drawn at once."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from torch_bridge.lowerings import dropout, random_keys


@pytest.fixture(autouse=True)
def wide() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def words(key: jax.Array) -> tuple[int, ...]:
    return tuple(map(int, jax.random.key_data(key)))


def test_every_key_is_another() -> None:
    """Small seeds and offsets, as scripts have them, large ones, and indices along a mesh."""
    numbers = jnp.asarray([*range(40), 2**32 - 1, 2**32, 2**63, 2**64 - 1], jnp.uint64)
    keys = jax.vmap(lambda s: jax.vmap(lambda o: jax.random.key_data(random_keys.from_seed(s, o)))(numbers))(numbers)
    found = {tuple(map(int, k)) for k in np.asarray(keys).reshape(-1, 4)}
    assert len(found) == len(numbers) ** 2
    key = random_keys.from_seed(jnp.uint64(0), jnp.uint64(0))
    folded = [random_keys.fold_in(random_keys.fold_in(key, i), j) for i in range(8) for j in range(8)]
    assert len({words(k) for k in folded} | found) == len(found) + 64
    bits = [jnp.int64(n) for n in (0, 1, -1, 2**40)]
    assert len({words(random_keys.from_bits(b)) for b in bits} | found) == len(found) + 4


def test_other_keys_are_folded_as_jax_does() -> None:
    key = jax.random.key(0)
    assert (
        not random_keys.is_counted(key)
        and (jax.random.key_data(random_keys.fold_in(key, 3)) == jax.random.key_data(jax.random.fold_in(key, 3))).all()
    )


def test_masks_of_neighbours_have_nothing_to_do_with_each_other() -> None:
    """Means and correlations of masks of consecutive offsets, seeds and indices: within five standard deviations."""
    n = 1 << 16
    first = random_keys.from_seed(jnp.uint64(0), jnp.uint64(0))
    keys = [
        *(random_keys.from_seed(jnp.uint64(0), jnp.uint64(k)) for k in range(6)),
        *(random_keys.from_seed(jnp.uint64(k), jnp.uint64(0)) for k in range(1, 6)),
        *(random_keys.fold_in(first, k) for k in range(6)),
    ]
    masks = np.stack([dropout.keep_mask(k, 0.5, (n,)) for k in keys]).astype(np.float64) * 2 - 1
    together = masks @ masks.T / n
    np.fill_diagonal(together, 0)
    assert abs(masks.mean(1)).max() < 5 / n**0.5 and abs(together).max() < 5 / n**0.5
