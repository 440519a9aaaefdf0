"""The gated MLPs of a mixture of experts as one: rows, sorted by group, through `(act(x @ gate) * (x @ up)) @ down` of their group.

Rows go into tiles once (`grouped_tiles`) and stay there through both products, and so they do for the gradients: what is as wide as gate and up together is
neither sorted nor put together from parts. For the gradients the first product of tiles is kept; blocks make it anew, with their matrix at hand.

Legend: m rows, k contracted (hidden), n intermediate, g groups, c rows of a tile, r rows that are kept.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from torch_bridge.lowerings import grouped_tiles, torch_kernels
from torch_bridge.lowerings._opmath import wide_dtype, widen
from torch_bridge.lowerings.grouped_matmul import grouped_rows, ragged_outer, ragged_rows
from torch_bridge.lowerings.grouped_tiles import Cut, matrix
from torch_bridge.lowerings.matmul import Dims, dot

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "relu": jax.nn.relu,
    "sigmoid": jax.nn.sigmoid,
    "silu": jax.nn.silu,
    "tanh": jnp.tanh,
}

Arrays = tuple[jax.Array, ...]

_ROWS: Dims = (((1,), (0,)), ((), ()))
_TURNED: Dims = (((1,), (1,)), ((), ()))
_OUTER: Dims = (((0,), (0,)), ((), ()))
_TILES: Dims = (((2,), (1,)), ((0,), (0,)))
_TILES_TURNED: Dims = (((2,), (2,)), ((0,), (0,)))
_TILES_OUTER: Dims = (((1,), (1,)), ((0,), (0,)))


def kept_rows(m: int, g: int, mean: int) -> int:
    """How many rows of the first product are kept."""
    return max(m, g * grouped_tiles.tile_rows(m, g, mean)) if g else m


def _gated(act: str, y: jax.Array) -> jax.Array:
    """[..., 2 n] -> [..., n]."""
    gate, up = jnp.split(widen(y), 2, axis=-1)
    return (ACTIVATIONS[act](gate) * up).astype(y.dtype)


def _gated_back(act: str, y: jax.Array, grad: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Of `_gated` the result and the gradient of its argument."""
    gate, up = jnp.split(widen(y), 2, axis=-1)
    grad = widen(grad)
    a, slope = jax.vjp(ACTIVATIONS[act], gate)
    of_gate, of_up = slope(grad * up)[0].astype(y.dtype), (grad * a).astype(y.dtype)
    edges, n = [(0, 0)] * (y.ndim - 1), up.shape[-1]
    return (a * up).astype(y.dtype), jnp.pad(of_gate, [*edges, (0, n)]) + jnp.pad(
        of_up, [*edges, (n, 0)]
    )  # XLA would not fuse a concatenation


# -- tiles and blocks ------------------------------------------------------------------------------


def _products(x_mk: jax.Array, first_gkn: jax.Array) -> int:
    return x_mk.shape[0] * first_gkn.shape[1] * first_gkn.shape[2]


def _cut(mean: int, x_mk: jax.Array, first_gkn: jax.Array, offs: jax.Array) -> Cut:
    return grouped_tiles.cut(offs, x_mk.shape[0], _products(x_mk, first_gkn), mean)


def _forward_default(
    act: str, mean: int, x_mk: jax.Array, first: jax.Array, second: jax.Array, offs: jax.Array
) -> tuple[jax.Array, jax.Array]:
    cut = _cut(mean, x_mk, first, offs)

    def tiles() -> tuple[jax.Array, jax.Array]:
        y = dot(cut.tiles(x_mk), first, _TILES)
        return cut.rows(dot(_gated(act, y), second, _TILES)), y

    def block(group: jax.Array, read: Callable[..., jax.Array], write: Callable[..., jax.Array], out: jax.Array) -> jax.Array:
        y = dot(read(x_mk), matrix(first, group), _ROWS)
        return write(out, dot(_gated(act, y), matrix(second, group), _ROWS))

    out, kept = cut.by_tiles(tiles)
    kept = kept.reshape(offs.shape[0] * cut.c, first.shape[2])
    more = kept_rows(x_mk.shape[0], offs.shape[0], mean) - kept.shape[0]
    return cut.by_blocks(block, out), jnp.pad(kept, ((0, more), (0, 0))) if more else kept


def _backward_default(
    act: str, mean: int, grad_mk: jax.Array, x_mk: jax.Array, first: jax.Array, second: jax.Array, offs: jax.Array, kept: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    cut, wide = _cut(mean, x_mk, first, offs), wide_dtype(x_mk.dtype)

    def tiles() -> tuple[jax.Array, jax.Array, jax.Array]:
        grads, x = cut.tiles(grad_mk), cut.tiles(x_mk)
        y = kept[: offs.shape[0] * cut.c].reshape(offs.shape[0], cut.c, first.shape[2])
        a, grad_y = _gated_back(act, y, dot(grads, second, _TILES_TURNED))
        return cut.rows(dot(grad_y, first, _TILES_TURNED)), dot(x, grad_y, _TILES_OUTER, wide), dot(a, grads, _TILES_OUTER, wide)

    def block(
        group: jax.Array, read: Callable[..., jax.Array], write: Callable[..., jax.Array], state: tuple[jax.Array, jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        grads, x, own, down = read(grad_mk), read(x_mk), matrix(first, group), matrix(second, group)
        a, grad_y = _gated_back(act, dot(x, own, _ROWS), dot(grads, down, _TURNED))
        return (
            write(state[0], dot(grad_y, own, _TURNED)),
            grouped_tiles.add(state[1], group, dot(x, grad_y, _OUTER, wide)),
            grouped_tiles.add(state[2], group, dot(a, grads, _OUTER, wide)),
        )

    grad_x, grad_first, grad_second = cut.by_blocks(block, cut.by_tiles(tiles))
    return grad_x, grad_first.astype(x_mk.dtype), grad_second.astype(x_mk.dtype)


# -- with kernels of torch, product by product -----------------------------------------------------


def _forward_torch(
    act: str, mean: int, x_mk: jax.Array, first: jax.Array, second: jax.Array, offs: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """It keeps what `_forward_default` keeps: forward and backward may belong to programs only one of which may call kernels."""
    cut = _cut(mean, x_mk, first, offs)
    kept = jax.ShapeDtypeStruct((kept_rows(x_mk.shape[0], offs.shape[0], mean), first.shape[2]), x_mk.dtype)
    out, kept = torch_kernels.call("grouped_mlp", (x_mk, kept), x_mk, first, second, offs, cut.tiled, act=act, c=cut.c)
    return out, kept


def _backward_torch(
    act: str, mean: int, grad_mk: jax.Array, x_mk: jax.Array, first: jax.Array, second: jax.Array, offs: jax.Array, kept: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    cut, given = _cut(mean, x_mk, first, offs), (grad_mk, x_mk, first, second, offs, kept)
    grad_x, grad_first, grad_second = torch_kernels.call("grouped_mlp_gradients", given[1:4], *given, cut.tiled, act=act, c=cut.c)
    return grad_x, grad_first, grad_second


def _by_platform(products: int, act: str, mean: int, ways: Sequence[Callable[..., Any]], *arrays: jax.Array) -> Any:
    """ways: with ragged products, with tiles and blocks, with kernels of torch."""
    tpu, default, kernel = (functools.partial(f, act, mean) for f in ways)
    return lax.platform_dependent(*arrays, tpu=tpu, default=default, **grouped_tiles.kernel_on_cpus(products, kernel, *arrays))


# -- with ragged products --------------------------------------------------------------------------


def _forward_ragged(
    act: str, mean: int, x_mk: jax.Array, first: jax.Array, second: jax.Array, offs: jax.Array
) -> tuple[jax.Array, jax.Array]:
    y = ragged_rows(False, x_mk, first, offs)
    kept = jnp.pad(y, ((0, kept_rows(x_mk.shape[0], offs.shape[0], mean) - x_mk.shape[0]), (0, 0)))
    return ragged_rows(False, _gated(act, y), second, offs), kept


def _backward_ragged(
    act: str, mean: int, grad_mk: jax.Array, x_mk: jax.Array, first: jax.Array, second: jax.Array, offs: jax.Array, kept: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    del mean
    a, grad_y = _gated_back(act, kept[: x_mk.shape[0]], ragged_rows(True, grad_mk, second, offs))
    return ragged_rows(True, grad_y, first, offs), ragged_outer(x_mk, grad_y, offs), ragged_outer(a, grad_mk, offs)


# -- the function and its gradients ----------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def grouped_mlp(act: str, mean: int, x_mk: jax.Array, first: jax.Array, second: jax.Array, offs: jax.Array) -> tuple[jax.Array, jax.Array]:
    """[m, k] and what `gradients` wants to have kept. act: a key of ACTIVATIONS. mean: rows expected in a group; it changes no values.

    first: [g, k, 2 n], gate and then up. second: [g, n, k]. offs: [g] where each group's rows end; rows behind the last end give zeros.
    """
    if 0 in (x_mk.shape[0], offs.shape[0]):
        return jnp.zeros_like(x_mk), jnp.zeros((kept_rows(x_mk.shape[0], offs.shape[0], mean), first.shape[2]), x_mk.dtype)
    out, kept = _by_platform(
        _products(x_mk, first), act, mean, (_forward_ragged, _forward_default, _forward_torch), x_mk, first, second, offs
    )
    return out, kept


def _forward(act: str, mean: int, *given: jax.Array) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, ...]]:
    out, kept = grouped_mlp(act, mean, *given)
    return (out, kept), (*given, kept)


def _backward(act: str, mean: int, saved: tuple[jax.Array, ...], grads: tuple[jax.Array, jax.Array]) -> tuple[jax.Array | None, ...]:
    return *gradients(act, mean, grads[0], *saved), None


grouped_mlp.defvjp(_forward, _backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def gradients(
    act: str, mean: int, grad_mk: jax.Array, x_mk: jax.Array, first: jax.Array, second: jax.Array, offs: jax.Array, kept: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Of the rows and of both matrices, from that of the result."""
    if 0 in (x_mk.shape[0], offs.shape[0]):
        return jnp.zeros_like(x_mk), jnp.zeros_like(first), jnp.zeros_like(second)
    ways = (_backward_ragged, _backward_default, _backward_torch)
    grad_x, grad_first, grad_second = _by_platform(_products(x_mk, first), act, mean, ways, grad_mk, x_mk, first, second, offs, kept)
    return grad_x, grad_first, grad_second


def _by_products(act: str, offs: jax.Array, grad_mk: jax.Array, x_mk: jax.Array, first: jax.Array, second: jax.Array) -> Arrays:
    """`gradients` product by product, for gradients of gradients."""
    _, back = jax.vjp(lambda x, first, second: grouped_rows(_gated(act, grouped_rows(x, first, offs)), second, offs), x_mk, first, second)
    return back(grad_mk)


def _gradients_forward(act: str, mean: int, *given: jax.Array) -> tuple[tuple[jax.Array, jax.Array, jax.Array], tuple[jax.Array, ...]]:
    return gradients(act, mean, *given), given


def _gradients_backward(act: str, mean: int, saved: tuple[jax.Array, ...], grads: tuple[jax.Array, ...]) -> tuple[jax.Array | None, ...]:
    *given, offs, _ = saved
    return *jax.vjp(functools.partial(_by_products, act, offs), *given)[1](grads), None, None


gradients.defvjp(_gradients_forward, _gradients_backward)
