"""`_grouped_mm`: the products of mixture-of-experts layers, one matrix per group of rows.

`lax.ragged_dot` is one kernel on TPU only; elsewhere JAX expands it to one masked product per group, so the work grows with
the number of groups. Here most rows are multiplied as a batch of tiles and the others block by block (`grouped_tiles`): the work is about that of the rows up
to the last offset. No routing needs a program of its own.

Legend: m rows, k contracted, n columns, g groups.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.custom_batching
import jax.numpy as jnp
import torch
from jax import lax

from torch_bridge.ir import dtypes
from torch_bridge.lowerings import grouped_tiles, torch_kernels
from torch_bridge.lowerings._opmath import wide_dtype
from torch_bridge.lowerings.matmul import bmm, dot, precision_of
from torch_bridge.lowerings.registry import lowering

aten = torch.ops.aten

_RAGGED_CONTRACTING = lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((0,), (0,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[]
)


def _rows_default(transposed: bool, x_mk: jax.Array, w_gkn: jax.Array, offs: jax.Array) -> jax.Array:
    products = x_mk.shape[0] * w_gkn.shape[1] * w_gkn.shape[2]
    cut = grouped_tiles.cut(offs, x_mk.shape[0], products)

    def tiles() -> jax.Array:
        return cut.rows(dot(cut.tiles(x_mk), w_gkn, (((2,), (2 if transposed else 1,)), ((0,), (0,)))))

    def block(group: jax.Array, read: Callable[..., jax.Array], write: Callable[..., jax.Array], out: jax.Array) -> jax.Array:
        return write(out, dot(read(x_mk), grouped_tiles.matrix(w_gkn, group), (((1,), (1 if transposed else 0,)), ((), ()))))

    return cut.by_blocks(block, cut.by_tiles(tiles))


def _outer_default(x_mk: jax.Array, y_mn: jax.Array, offs: jax.Array) -> jax.Array:
    """What belongs to matrices: sums over rows, in float32 at least."""
    products = x_mk.shape[0] * x_mk.shape[1] * y_mn.shape[1]
    cut, wide = grouped_tiles.cut(offs, x_mk.shape[0], products), wide_dtype(x_mk.dtype)

    def tiles() -> jax.Array:
        return dot(cut.tiles(x_mk), cut.tiles(y_mn), (((1,), (1,)), ((0,), (0,))), wide)

    def block(group: jax.Array, read: Callable[..., jax.Array], write: object, total: jax.Array) -> jax.Array:
        return grouped_tiles.add(total, group, dot(read(x_mk), read(y_mn), (((0,), (0,)), ((), ())), wide))

    return cut.by_blocks(block, cut.by_tiles(tiles)).astype(x_mk.dtype)


def _rows_torch(transposed: bool, x_mk: jax.Array, w_gkn: jax.Array, offs: jax.Array) -> jax.Array:
    out = jax.ShapeDtypeStruct((x_mk.shape[0], w_gkn.shape[1 if transposed else 2]), x_mk.dtype)
    return torch_kernels.call("grouped_rows", (out,), x_mk, w_gkn, offs, transposed=transposed)[0]


def _outer_torch(x_mk: jax.Array, y_mn: jax.Array, offs: jax.Array) -> jax.Array:
    out = jax.ShapeDtypeStruct((offs.shape[0], x_mk.shape[1], y_mn.shape[1]), x_mk.dtype)
    return torch_kernels.call("grouped_outer", (out,), x_mk, y_mn, offs)[0]


def _sizes(offs: jax.Array) -> jax.Array:
    return jnp.diff(offs, prepend=jnp.zeros(1, offs.dtype)).astype(jnp.int32)


def ragged_rows(transposed: bool, x_mk: jax.Array, w_gkn: jax.Array, offs: jax.Array) -> jax.Array:
    """`grouped_rows` as one ragged product."""
    w_gkn = w_gkn.swapaxes(1, 2) if transposed else w_gkn
    found: jax.Array = _one_by_one(lax.ragged_dot, x_mk.dtype)(x_mk, w_gkn, _sizes(offs))
    return found


def ragged_outer(x_mk: jax.Array, y_mn: jax.Array, offs: jax.Array) -> jax.Array:
    """`grouped_outer` as one ragged product."""
    product = functools.partial(lax.ragged_dot_general, ragged_dot_dimension_numbers=_RAGGED_CONTRACTING)
    found: jax.Array = _one_by_one(product, x_mk.dtype)(x_mk, y_mn, _sizes(offs))
    return found


def _one_by_one(product: Callable[..., jax.Array], dtype: Any) -> Callable[..., jax.Array]:
    """A ragged product that `vmap` makes a loop of: within a second `vmap` (ranks on one device, along two mesh axes) JAX has no rule for it."""
    return jax.custom_batching.sequential_vmap(functools.partial(product, precision=precision_of(dtype)))


Saved = tuple[jax.Array, jax.Array, jax.Array]


def grouped_rows(x_mk: jax.Array, w_gkn: jax.Array, offs: jax.Array) -> jax.Array:
    """Rows `offs[i-1]:offs[i]` of `x` times matrix i of `w` -> [m, n]; rows behind the last offset give zeros."""
    return _rows(False, x_mk, w_gkn, offs)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _rows(transposed: bool, x_mk: jax.Array, w_gkn: jax.Array, offs: jax.Array) -> jax.Array:
    """`grouped_rows`, or with the transposes of the matrices: [m, n] -> [m, k]."""
    if 0 in (x_mk.shape[0], offs.shape[0]):
        return jnp.zeros((x_mk.shape[0], w_gkn.shape[1 if transposed else 2]), x_mk.dtype)
    tpu, default = (functools.partial(f, transposed) for f in (ragged_rows, _rows_default))
    kernel = grouped_tiles.kernel_on_cpus(
        x_mk.shape[0] * w_gkn.shape[1] * w_gkn.shape[2], functools.partial(_rows_torch, transposed), x_mk, w_gkn
    )
    return lax.platform_dependent(x_mk, w_gkn, offs, tpu=tpu, default=default, **kernel)


def _rows_fwd(transposed: bool, x_mk: jax.Array, w_gkn: jax.Array, offs: jax.Array) -> tuple[jax.Array, Saved]:
    return _rows(transposed, x_mk, w_gkn, offs), (x_mk, w_gkn, offs)


def _rows_bwd(transposed: bool, saved: Saved, grad_mn: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    x_mk, w_gkn, offs = saved
    of_matrices = grouped_outer(grad_mn, x_mk, offs) if transposed else grouped_outer(x_mk, grad_mn, offs)
    return _rows(not transposed, grad_mn, w_gkn, offs), of_matrices, None


_rows.defvjp(_rows_fwd, _rows_bwd)


@jax.custom_vjp
def grouped_outer(x_mk: jax.Array, y_mn: jax.Array, offs: jax.Array) -> jax.Array:
    """Per group of rows, `x.T @ y` -> [g, k, n]."""
    if 0 in (x_mk.shape[0], offs.shape[0]):
        return jnp.zeros((offs.shape[0], x_mk.shape[1], y_mn.shape[1]), x_mk.dtype)
    kernel = grouped_tiles.kernel_on_cpus(x_mk.shape[0] * x_mk.shape[1] * y_mn.shape[1], _outer_torch, x_mk, y_mn)
    return lax.platform_dependent(x_mk, y_mn, offs, tpu=ragged_outer, default=_outer_default, **kernel)


def _grouped_outer_fwd(x_mk: jax.Array, y_mn: jax.Array, offs: jax.Array) -> tuple[jax.Array, Saved]:
    return grouped_outer(x_mk, y_mn, offs), (x_mk, y_mn, offs)


def _grouped_outer_bwd(saved: Saved, grad_gkn: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    x_mk, y_mn, offs = saved
    return _rows(True, y_mn, grad_gkn, offs), grouped_rows(x_mk, grad_gkn, offs), None


grouped_outer.defvjp(_grouped_outer_fwd, _grouped_outer_bwd)


@lowering(aten._grouped_mm.default, once=True, kernels=bool)
def grouped_mm(
    self: jax.Array,
    mat2: jax.Array,
    offs: jax.Array | None = None,
    bias: jax.Array | None = None,
    out_dtype: torch.dtype | None = None,
) -> jax.Array:
    """`offs` (cumulative ends) cuts the rows of a 2-d `self`, the columns of a 2-d `mat2`, or, if both are 2-d, what is contracted."""
    if bias is not None:
        raise NotImplementedError(
            "aten._grouped_mm with a bias is not supported (torch does not support it either); add the bias afterwards."
        )
    match self.ndim, mat2.ndim:
        case 3, 3:
            out = bmm(self, mat2)
        case 2, 3:
            out = _rows(False, self, mat2, offs)
        case 3, 2:
            out = _rows(True, mat2.T, self, offs).T
        case _:
            out = grouped_outer(self.T, mat2, offs)
    return out if out_dtype is None else out.astype(dtypes.to_jax(out_dtype))
