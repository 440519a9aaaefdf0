"""Rows that are sorted by group, cut up to be multiplied with their groups' matrices: the first c rows of every group in a tile, others in blocks.

Tiles are multiplied as a batch, which reads matrices where they lie. A loop over blocks reads a group's matrix out of the array of all before it multiplies
(on a CPU it is copied), but its end is a value: it multiplies what is left of larger groups, or everything where groups are too different for tiles. So a
product is compiled twice, whatever the routing and the number of groups.

Legend: m rows, k columns, g groups, c rows of a tile, b rows of a block.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from torch_bridge.lowerings import torch_kernels

SMALL = 2**25
"""Multiplications below which a loop does: tiles are one more product to compile."""
_MATRIX = 40
"""What it costs a block to read its matrix and to add to its gradient, in rows."""

State = Any
Block = Callable[[jax.Array, State], State]


def tile_rows(m: int, g: int, mean: int | None = None) -> int:
    """A little more than the mean group, so that it holds most groups; a multiple of 8. mean: rows expected in a group, where it is not m / g."""
    return -(-max(1, round((m / g if mean is None else mean) * 17 / 16)) // 8) * 8


def block_rows(m: int, g: int, mean: int | None = None) -> int:
    """About a quarter of the mean group, so that part-filled blocks cost little; a power of two from 16 to 512."""
    mean = m // max(1, g) if mean is None else mean
    return min(512, max(16, 1 << max(0, (mean // 4).bit_length() - 1)))


def starts(offs: jax.Array) -> jax.Array:
    """Where each group's rows start."""
    return jnp.concatenate([jnp.zeros(1, offs.dtype), offs[:-1]])


def blocks(offs: jax.Array, m: int, b: int, first: jax.Array | None = None) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Group, first row and end row of every block, in row order, and how many are needed; others lie behind the rows, at m.

    first: the first row of each group that needs a block; default its first row.
    """
    g = offs.shape[0]
    first = starts(offs) if first is None else first
    counts = (offs - first + b - 1) // b
    last_block = jnp.cumsum(counts)
    block = jnp.arange(min(m, m // b + g), dtype=offs.dtype)
    group = jnp.minimum(jnp.searchsorted(last_block, block, side="right"), g - 1)
    first_block = last_block[group] - counts[group]
    used = block < last_block[-1]
    return group, jnp.where(used, first[group] + (block - first_block) * b, m), jnp.where(used, offs[group], m), last_block[-1]


def fits(offs: jax.Array, c: int, b: int) -> jax.Array:
    """Whether tiles of c rows, and blocks of b for the rest, cost less than blocks alone, in rows that are multiplied."""
    groups = offs - starts(offs)

    def cost(left: jax.Array) -> jax.Array:
        return jnp.sum((left + b - 1) // b) * (b + _MATRIX)

    return offs.shape[0] * c + cost(jnp.maximum(groups - c, 0)) < cost(groups)


@dataclasses.dataclass(frozen=True)
class Cut:
    """How m rows are cut at run time. offs: [g], where groups end. c, b: rows of a tile, 0 for no tiles, and of a block. tiled: whether tiles are used."""

    offs: jax.Array
    m: int
    c: int
    b: int
    tiled: jax.Array | None

    def tiles(self, x_mk: jax.Array) -> jax.Array:
        """[g, c, k], zero behind each group's rows."""
        at = starts(self.offs)[:, None] + jnp.arange(self.c, dtype=self.offs.dtype)
        found = x_mk.at[at].get(mode="clip")
        return jnp.where((at < self.offs[:, None])[:, :, None], found, jnp.zeros((), x_mk.dtype))

    def rows(self, tiles_gck: jax.Array) -> jax.Array:
        """[m, k] of what `tiles` makes; rows that are in no tile are zero."""
        if self.c == 0:
            return jnp.zeros((self.m, tiles_gck.shape[2]), tiles_gck.dtype)
        row = jnp.arange(self.m, dtype=self.offs.dtype)
        group = jnp.minimum(jnp.searchsorted(self.offs, row, side="right"), self.offs.shape[0] - 1)
        place = row - starts(self.offs)[group]
        inside = (place < self.c) & (row < self.offs[-1])
        at = jnp.where(inside, group * self.c + place, 0)
        return jnp.where(inside[:, None], tiles_gck.reshape(-1, tiles_gck.shape[2])[at], jnp.zeros((), tiles_gck.dtype))

    def by_tiles(self, make: Callable[[], State]) -> State:
        """What `make` makes of tiles; zeros if tiles are not used."""
        shapes = jax.eval_shape(make)

        def zeros() -> State:
            return jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), shapes)

        return zeros() if self.tiled is None else lax.cond(self.tiled, make, zeros)

    def by_blocks(self, step: Callable[[jax.Array, Callable[..., Any], Callable[..., Any], State], State], state: State) -> State:
        """`step(group, read, write, state)` for all blocks of what is in no tile.

        `read(a)` is the block's part of rows a, with zeros for rows that are not its own; `write(rows, part)` puts those that are its own back.
        """
        first = starts(self.offs)
        first = first if self.tiled is None else jnp.minimum(first + jnp.where(self.tiled, self.c, 0).astype(first.dtype), self.offs)
        b = min(self.m, self.b)
        group, start, end, count = blocks(self.offs, self.m, b, first)

        def read(at: jax.Array, own: jax.Array, a: jax.Array) -> jax.Array:
            part = lax.dynamic_slice_in_dim(a, at, b)
            return jnp.where(own, part, jnp.zeros_like(part))

        def write(at: jax.Array, own: jax.Array, rows: jax.Array, part: jax.Array) -> jax.Array:
            return lax.dynamic_update_slice_in_dim(rows, jnp.where(own, part, lax.dynamic_slice_in_dim(rows, at, b)), at, 0)

        def body(i: jax.Array, state: State) -> State:
            at = jnp.minimum(start[i], self.m - b)  # it may start earlier than it has to, so as not to reach behind the last row
            row = at + jnp.arange(b)
            own = ((row >= start[i]) & (row < end[i]))[:, None]
            return step(group[i], functools.partial(read, at, own), functools.partial(write, at, own), state)

        return lax.fori_loop(0, count, body, state)


def kernel_on_cpus(products: int, kernel: Callable[..., Any], *operands: jax.Array) -> dict[str, Callable[..., Any]]:
    """For `lax.platform_dependent`: a kernel of torch, where `cut` would make tiles and the program may call it."""
    return {"cpu": kernel} if products >= SMALL and torch_kernels.wanted(*operands) else {}


def cut(offs: jax.Array, m: int, products: int, mean: int | None = None) -> Cut:
    """How to cut m rows. products: multiplications that the rows take; few are for blocks alone. mean: see `tile_rows`."""
    g = offs.shape[0]
    b = block_rows(m, g, mean)
    if products < SMALL:
        return Cut(offs, m, 0, b, None)
    c = tile_rows(m, g, mean)
    return Cut(offs, m, c, b, fits(offs, c, b))


def matrix(w_gkn: jax.Array, group: jax.Array) -> jax.Array:
    """One group's matrix."""
    found: jax.Array = lax.dynamic_index_in_dim(w_gkn, group, keepdims=False)
    return found


def add(total_gkn: jax.Array, group: jax.Array, more_kn: jax.Array) -> jax.Array:
    """Something added to one group's matrix."""
    return lax.dynamic_update_index_in_dim(total_gkn, matrix(total_gkn, group) + more_kn, group, 0)
