"""Collectives as ops of the graph: `torch_bridge::all_reduce` and the like, their shapes, and what they become in JAX.

`groups` names the ranks that work together: mesh axes ("tp", "dp,tp") or explicit lists ("[[0, 3], [1, 2]]").
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch

from torch_bridge.ir.segment import LOCK
from torch_bridge.ir.view_entries import flat as flat_layout
from torch_bridge.ir.view_entries import step_entry
from torch_bridge.lowerings import AxesRule, lowering
from torch_bridge.mesh import world
from torch_bridge.recorder import dispatch
from torch_bridge.recorder.tensor import XLATensor, fresh, read

_library = torch.library.Library("torch_bridge", "FRAGMENT")
_library.define("all_reduce(Tensor x, str kind, str groups) -> Tensor")
_library.define("all_gather(Tensor x, int dim, int count, str groups) -> Tensor")
_library.define("reduce_scatter(Tensor x, str kind, int dim, int count, str groups) -> Tensor")
_library.define("all_to_all(Tensor x, int split_dim, int concat_dim, int count, str groups) -> Tensor")
_library.define("permute(Tensor x, str pairs) -> Tensor")
_library.define("broadcast(Tensor x, int root, str groups) -> Tensor")
ops = torch.ops.torch_bridge


def _like(x: torch.Tensor, *_: object) -> torch.Tensor:
    return x.new_empty(x.shape)


def _gathered(x: torch.Tensor, dim: int, count: int, groups: str) -> torch.Tensor:
    return x.new_empty([n * count if d == dim else n for d, n in enumerate(x.shape)])


def _scattered(x: torch.Tensor, kind: str, dim: int, count: int, groups: str) -> torch.Tensor:
    return x.new_empty([n // count if d == dim else n for d, n in enumerate(x.shape)])


def _exchanged(x: torch.Tensor, split_dim: int, concat_dim: int, count: int, groups: str) -> torch.Tensor:
    size = list(x.shape)
    size[split_dim] //= count
    size[concat_dim] *= count
    return x.new_empty(size)


def _alone(*_: object) -> Any:
    raise RuntimeError("a graph with collectives runs on xla only: on one CPU there are no other ranks to exchange with")


_METAS = {
    "all_reduce": _like,
    "all_gather": _gathered,
    "reduce_scatter": _scattered,
    "all_to_all": _exchanged,
    "permute": _like,
    "broadcast": _like,
}
for _name, _meta in _METAS.items():
    _library.impl(_name, _meta, "Meta")
    _library.impl(_name, _alone, "CPU")


def emit(op: torch._ops.OpOverload, inputs: Sequence[torch.Tensor], args: tuple[Any, ...]) -> XLATensor:
    """Record an op of ours on xla tensors, constants after them."""
    with LOCK:
        ids = []
        for t in inputs:
            assert isinstance(t, XLATensor)
            ids.append(read(t))
        entry = step_entry(op, tuple(flat_layout(t._layout) for t in inputs), args)  # type: ignore[attr-defined]
        segment = dispatch.STATE.session.current
        vid = segment.emit(entry, tuple(ids))
        assert entry.outs[0] is not None
        return fresh(segment, entry.outs[0], vid)


# -- what they become -----------------------------------------------------------------------------


class Lines:
    """Inside a program: the ranks that work together, by mesh axes or by a table of members."""

    def __init__(self, text: str):
        self.members: list[list[int]] | None = json.loads(text) if text.startswith("[") else None
        self.axes = tuple(world.current().axes) if self.members is not None else tuple(a for a in text.split(",") if a)

    @property
    def places(self) -> list[list[int]] | None:
        """What JAX wants as `axis_index_groups`: each group's places on the mesh, in group order; None along axes."""
        if self.members is None:
            return None
        place, there = world.positions(), set(world.current().order)
        return [[place[m] for m in group] for group in self.members if there.issuperset(group)]

    def index(self) -> Any:
        """This rank's place in its group."""
        if self.members is None:
            return jax.lax.axis_index(self.axes)
        at = {r: k for group in self.members for k, r in enumerate(group)}
        return jnp.asarray([at[r] for r in world.current().order], jnp.int32)[_place()]

    def stack(self, x: jax.Array) -> Any:
        """The group's values along a new leading dim."""
        return jax.lax.all_gather(x, self.axes, axis_index_groups=self.places)


@functools.cache
def _lines(text: str, epoch: int) -> Lines:
    return Lines(text)


def lines(text: str) -> Lines:
    return _lines(text, world.current().epoch)


def _place() -> Any:
    """This rank's place in row-major order over the axes."""
    return jax.lax.axis_index(tuple(world.current().axes))


def kept(x: jax.Array) -> Any:
    """What a collective is given, so that XLA leaves the collective where it is.

    It makes arithmetic of one whose ranks have the same: a constant, a sum of a sum. Where each process compiles its own program, another's may have something
    else there (`if rank == 0: weight = ...; broadcast(weight, 0)`), and would wait for this one for ever.
    """
    return x if world.process_count() == 1 else jax.lax.optimization_barrier(x)


_DIRECT = {"sum": jax.lax.psum, "max": jax.lax.pmax, "min": jax.lax.pmin}


def reduce(x: jax.Array, kind: str, groups: Lines) -> Any:
    """The group's values reduced; the same on each of them."""
    if kind in ("and", "or"):
        fold: Any = jnp.bitwise_and if kind == "and" else jnp.bitwise_or
        if x.dtype == jnp.bool_:
            return reduce(x.astype(jnp.int32), "min" if kind == "and" else "max", groups).astype(jnp.bool_)
        return functools.reduce(fold, list(_unstacked(groups.stack(x))))
    if x.dtype == jnp.bool_:
        return reduce(x.astype(jnp.int32), kind, groups).astype(jnp.bool_)
    if kind == "mul":
        return jnp.prod(groups.stack(x), axis=0, dtype=x.dtype)
    return _DIRECT[kind](x, groups.axes, axis_index_groups=groups.places)


def _unstacked(x: jax.Array) -> Any:
    return (x[k] for k in range(x.shape[0]))


@lowering(ops.all_reduce.default, collective=True, axes=AxesRule.REMOVES, batches=True)
def _all_reduce(x: jax.Array, kind: str, groups: str) -> Any:
    return reduce(kept(x), kind, lines(groups))


@lowering(ops.all_gather.default, collective=True, axes=AxesRule.REMOVES, batches=True)
def _all_gather(x: jax.Array, dim: int, count: int, groups: str) -> Any:
    found = lines(groups)
    return jax.lax.all_gather(kept(x), found.axes, axis=dim, tiled=True, axis_index_groups=found.places)


def scattered_sum(x: jax.Array, dim: int, count: int, groups: Lines) -> Any:
    """The sum over a group, of which each member gets its part along `dim`.

    Gloo's own, between processes on CPUs, gives up after 30 s without the others, where its other collectives wait for half an hour.
    """
    if world.process_count() == 1 or jax.default_backend() != "cpu":
        return jax.lax.psum_scatter(x, groups.axes, scatter_dimension=dim, tiled=True, axis_index_groups=groups.places)
    parts = jnp.stack(jnp.split(x, count, dim))
    return jax.lax.all_to_all(parts, groups.axes, 0, 0, axis_index_groups=groups.places).sum(0, dtype=x.dtype)


@lowering(ops.reduce_scatter.default, collective=True, axes=AxesRule.ADDS, batches=True)
def _reduce_scatter(x: jax.Array, kind: str, dim: int, count: int, groups: str) -> Any:
    found, x = lines(groups), kept(x)
    if kind == "sum" and x.dtype != jnp.bool_:
        return scattered_sum(x, dim, count, found)
    part = x.shape[dim] // count
    return jax.lax.dynamic_slice_in_dim(reduce(x, kind, found), found.index() * part, part, dim)


@lowering(ops.all_to_all.default, collective=True, axes=AxesRule.ADDS)
def _all_to_all(x: jax.Array, split_dim: int, concat_dim: int, count: int, groups: str) -> Any:
    found = lines(groups)
    return jax.lax.all_to_all(kept(x), found.axes, split_dim, concat_dim, tiled=True, axis_index_groups=found.places)


@lowering(ops.permute.default, collective=True, axes=AxesRule.EVERY)
def _permute(x: jax.Array, pairs: str) -> Any:
    moved = x.astype(jnp.int32) if x.dtype == jnp.bool_ else x
    place = world.positions()
    there = set(world.current().order)
    moves = [(place[source], place[target]) for source, target in json.loads(pairs) if source in there and target in there]
    return jax.lax.ppermute(kept(moved), tuple(world.current().axes), moves).astype(x.dtype)


@lowering(ops.broadcast.default, collective=True, axes=AxesRule.REMOVES)
def _broadcast(x: jax.Array, root: int, groups: str) -> Any:
    found = lines(groups)
    wide = x.astype(jnp.int32) if x.dtype == jnp.bool_ else x
    return reduce(kept(jnp.where(found.index() == root, wide, jnp.zeros_like(wide))), "sum", found).astype(x.dtype)
