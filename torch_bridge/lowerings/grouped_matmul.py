"""`_grouped_mm`: the products of mixture-of-experts layers, one matrix per group of rows.

`lax.ragged_dot` is one kernel on TPU only; elsewhere JAX expands it to one masked product per group, so the work grows with
the number of groups. Here the rows are cut into blocks that each belong to one group, and a loop multiplies block by block:
the work is that of the rows, plus at most one part-filled block a group.

Legend: m rows, k contracted, n columns, g groups, b rows of a block.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import torch
from jax import lax

from torch_bridge.ir import dtypes
from torch_bridge.lowerings._opmath import HALF
from torch_bridge.lowerings.matmul import bmm, dot, precision_of
from torch_bridge.lowerings.registry import lowering

aten = torch.ops.aten

_RAGGED_CONTRACTING = lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((0,), (0,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[]
)


def _block_rows(m: int, g: int) -> int:
    """About a quarter of the mean group, so that part-filled blocks cost little; a power of two from 16 to 512."""
    return min(512, max(16, 1 << max(0, (m // max(1, 4 * g)).bit_length() - 1)))


def _blocks(offs: jax.Array, m: int, b: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Group, first row and end row of every block, in row order; blocks that are not needed lie behind the rows, at m."""
    g = offs.shape[0]
    starts = jnp.concatenate([jnp.zeros(1, offs.dtype), offs[:-1]])
    last_block = jnp.cumsum((offs - starts + b - 1) // b)
    block = jnp.arange(min(m, m // b + g), dtype=offs.dtype)
    group = jnp.minimum(jnp.searchsorted(last_block, block, side="right"), g - 1)
    first_block = last_block[group] - (offs - starts + b - 1)[group] // b
    used = block < last_block[-1]
    return group, jnp.where(used, starts[group] + (block - first_block) * b, m), jnp.where(used, offs[group], m)


def _pad_rows(x: jax.Array, b: int) -> jax.Array:
    return jnp.concatenate([x, jnp.zeros((b, x.shape[1]), x.dtype)])


def _rows_by_blocks(x_mk: jax.Array, w_gkn: jax.Array, offs: jax.Array) -> jax.Array:
    m, b = x_mk.shape[0], _block_rows(x_mk.shape[0], offs.shape[0])
    group, start, _ = _blocks(offs, m, b)
    padded = _pad_rows(x_mk, b)

    def step(i: jax.Array, out: jax.Array) -> jax.Array:
        rows = lax.dynamic_slice_in_dim(padded, start[i], b)
        y = dot(rows, lax.dynamic_index_in_dim(w_gkn, group[i], keepdims=False), (((1,), (0,)), ((), ())))
        return lax.dynamic_update_slice_in_dim(out, y, start[i], 0)  # rows past the group's end are overwritten by the next block

    out = lax.fori_loop(0, group.shape[0], step, jnp.zeros((m + b, w_gkn.shape[2]), x_mk.dtype))[:m]
    return jnp.where(jnp.arange(m)[:, None] < offs[-1], out, jnp.zeros_like(out))


def _outer_by_blocks(x_mk: jax.Array, y_mn: jax.Array, offs: jax.Array) -> jax.Array:
    m, b = x_mk.shape[0], _block_rows(x_mk.shape[0], offs.shape[0])
    group, start, end = _blocks(offs, m, b)
    x, y = _pad_rows(x_mk, b), _pad_rows(y_mn, b)
    wide = jnp.float32 if x_mk.dtype in HALF else x_mk.dtype

    def step(i: jax.Array, out: jax.Array) -> jax.Array:
        inside = (start[i] + jnp.arange(b) < end[i])[:, None]
        rows = [lax.dynamic_slice_in_dim(a, start[i], b) for a in (x, y)]
        xb, yb = (jnp.where(inside, r, jnp.zeros_like(r)) for r in rows)
        total = lax.dynamic_index_in_dim(out, group[i], keepdims=False) + dot(xb, yb, (((0,), (0,)), ((), ())), wide)
        return lax.dynamic_update_index_in_dim(out, total, group[i], 0)

    zeros = jnp.zeros((offs.shape[0], x.shape[1], y.shape[1]), wide)
    return lax.fori_loop(0, group.shape[0], step, zeros).astype(x_mk.dtype)


def _sizes(offs: jax.Array) -> jax.Array:
    return jnp.diff(offs, prepend=jnp.zeros(1, offs.dtype)).astype(jnp.int32)


def _rows_tpu(x_mk: jax.Array, w_gkn: jax.Array, offs: jax.Array) -> jax.Array:
    return lax.ragged_dot(x_mk, w_gkn, _sizes(offs), precision=precision_of(x_mk.dtype))


def _outer_tpu(x_mk: jax.Array, y_mn: jax.Array, offs: jax.Array) -> jax.Array:
    return lax.ragged_dot_general(x_mk, y_mn, _sizes(offs), _RAGGED_CONTRACTING, precision=precision_of(x_mk.dtype))


Saved = tuple[jax.Array, jax.Array, jax.Array]


@jax.custom_vjp
def grouped_rows(x_mk: jax.Array, w_gkn: jax.Array, offs: jax.Array) -> jax.Array:
    """Rows `offs[i-1]:offs[i]` of `x` times matrix i of `w` -> [m, n]; rows behind the last offset give zeros."""
    if 0 in (x_mk.shape[0], offs.shape[0]):
        return jnp.zeros((x_mk.shape[0], w_gkn.shape[2]), x_mk.dtype)
    return lax.platform_dependent(x_mk, w_gkn, offs, tpu=_rows_tpu, default=_rows_by_blocks)


def _grouped_rows_fwd(x_mk: jax.Array, w_gkn: jax.Array, offs: jax.Array) -> tuple[jax.Array, Saved]:
    return grouped_rows(x_mk, w_gkn, offs), (x_mk, w_gkn, offs)


def _grouped_rows_bwd(saved: Saved, grad_mn: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    x_mk, w_gkn, offs = saved
    return grouped_rows(grad_mn, w_gkn.swapaxes(1, 2), offs), grouped_outer(x_mk, grad_mn, offs), None


grouped_rows.defvjp(_grouped_rows_fwd, _grouped_rows_bwd)


@jax.custom_vjp
def grouped_outer(x_mk: jax.Array, y_mn: jax.Array, offs: jax.Array) -> jax.Array:
    """Per group of rows, `x.T @ y` -> [g, k, n]."""
    if 0 in (x_mk.shape[0], offs.shape[0]):
        return jnp.zeros((offs.shape[0], x_mk.shape[1], y_mn.shape[1]), x_mk.dtype)
    return lax.platform_dependent(x_mk, y_mn, offs, tpu=_outer_tpu, default=_outer_by_blocks)


def _grouped_outer_fwd(x_mk: jax.Array, y_mn: jax.Array, offs: jax.Array) -> tuple[jax.Array, Saved]:
    return grouped_outer(x_mk, y_mn, offs), (x_mk, y_mn, offs)


def _grouped_outer_bwd(saved: Saved, grad_gkn: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    x_mk, y_mn, offs = saved
    return grouped_rows(y_mn, grad_gkn.swapaxes(1, 2), offs), grouped_rows(x_mk, grad_gkn, offs), None


grouped_outer.defvjp(_grouped_outer_fwd, _grouped_outer_bwd)


@lowering(aten._grouped_mm.default)
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
            out = grouped_rows(self, mat2, offs)
        case 3, 2:
            out = grouped_rows(mat2.T, self.swapaxes(1, 2), offs).T
        case _:
            out = grouped_outer(self.T, mat2, offs)
    return out if out_dtype is None else out.astype(dtypes.to_jax(out_dtype))
