"""Regions of a program with annotations in which the script computes with what each device has: `xs.enable_manual_sharding` to `disable_manual_sharding`.

A tensor inside has the shape of one device's block, and ops on it are done by every device with its own block (`compiler.manual_blocks`). Gradients are those
of `jax.shard_map`: of what all devices had in common, those of all of them are added up.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import torch
from jax.sharding import NamedSharding, PartitionSpec

from torch_bridge.lowerings import lowering
from torch_bridge.mesh import spmd
from torch_bridge.mesh.spmd_mode import MODE
from torch_bridge.passes import manual_regions
from torch_bridge.recorder.tensor import XLATensor
from torch_bridge.runtime import backend

backend.ensure()

_library = torch.library.Library("torch_bridge", "FRAGMENT")
_library.define("enter_region(Tensor x, str sharding) -> Tensor")
_library.define("leave_region(Tensor x, str sharding, int[] size, bool add) -> Tensor")
_library.define("reduce_blocks(Tensor x, str kind, str devices) -> Tensor")
_library.define("gather_blocks(Tensor x, int dim, int count, str devices) -> Tensor")
_library.define("scatter_blocks(Tensor x, int dim, int count, str devices) -> Tensor")
ops = torch.ops.torch_bridge

KINDS = {"sum": jax.lax.psum, "max": jax.lax.pmax, "min": jax.lax.pmin}


def _along(x: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    return x.new_empty([size if d == dim else n for d, n in enumerate(x.shape)])


def _alone(*_: object) -> Any:
    raise RuntimeError("a graph with a region of manual sharding runs on xla only: on one CPU there are no other devices")


_METAS: dict[str, Any] = {
    "enter_region": lambda x, sharding: x.new_empty(spmd.parse(sharding).shard_shape(tuple(x.shape))),
    "leave_region": lambda x, sharding, size, add: x.new_empty(size),
    "reduce_blocks": lambda x, kind, devices: x.new_empty(x.shape),
    "gather_blocks": lambda x, dim, count, devices: _along(x, dim, x.shape[dim] * count),
    "scatter_blocks": lambda x, dim, count, devices: _along(x, dim, x.shape[dim] // count),
}
for _name, _meta in _METAS.items():
    _library.impl(_name, _meta, "Meta")
    _library.impl(_name, _alone, "CPU")


def _every(of: NamedSharding) -> PartitionSpec:
    """A row for each device, in the order of the mesh."""
    return PartitionSpec(tuple(of.mesh.axis_names))


@lowering(ops.enter_region.default)
def _enter(x: jax.Array, sharding: str) -> Any:
    of = spmd.in_order(spmd.parse(sharding))
    return jax.shard_map(lambda part: part[None], mesh=of.mesh, in_specs=of.spec, out_specs=_every(of), check_vma=False)(x)


@lowering(ops.leave_region.default)
def _leave(x: jax.Array, sharding: str, size: Sequence[int], add: bool) -> Any:
    of = spmd.in_order(spmd.parse(sharding))
    rest = copied(of)

    def whole(row: jax.Array) -> Any:
        return jax.lax.psum(row[0], rest) if add and rest else row[0]

    return jax.shard_map(whole, mesh=of.mesh, in_specs=_every(of), out_specs=of.spec, check_vma=False)(x)


def copied(of: NamedSharding) -> tuple[str, ...]:
    """The mesh axes along which all devices have the same block."""
    used = {a for part in of.spec for a in (part if isinstance(part, tuple) else (part,))}
    return tuple(a for a in of.mesh.axis_names if a not in used)


@lowering(ops.reduce_blocks.default)
def _reduce(x: jax.Array, kind: str, devices: str) -> Any:
    return KINDS[kind](x, *_axes(), axis_index_groups=_groups(devices))


@lowering(ops.gather_blocks.default)
def _gather(x: jax.Array, dim: int, count: int, devices: str) -> Any:
    return jax.lax.all_gather(x, *_axes(), axis=dim, tiled=True, axis_index_groups=_groups(devices))


@lowering(ops.scatter_blocks.default)
def _scatter(x: jax.Array, dim: int, count: int, devices: str) -> Any:
    return jax.lax.psum_scatter(x, *_axes(), scatter_dimension=dim, tiled=True, axis_index_groups=_groups(devices))


def _axes() -> tuple[tuple[str, ...]]:
    return (tuple(spmd.mesh().axis_names),)


def _groups(devices: str) -> Any:
    """Groups of devices by their numbers, as places on the mesh; None: all of them."""
    if not devices:
        return None
    number = {d: k for k, d in enumerate(spmd.devices())}
    place = {number[d]: at for at, d in enumerate(np.ravel(spmd.mesh().devices))}
    return [[place[k] for k in group] for group in json.loads(devices)]


# -- with gradients -------------------------------------------------------------------------------


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, sharding: NamedSharding) -> torch.Tensor:
        ctx.sharding, ctx.size = sharding, list(x.shape)
        return ops.enter_region(x, spmd.text(sharding))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        grad = grads[0] if inside(grads[0]) else _Enter.apply(grads[0], _whole(ctx.sharding))
        return ops.leave_region(grad, spmd.text(ctx.sharding), ctx.size, True), None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, sharding: NamedSharding, size: Sequence[int]) -> torch.Tensor:
        ctx.sharding = sharding
        return ops.leave_region(x, spmd.text(sharding), list(size), False)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        copies = math.prod(ctx.sharding.mesh.shape[a] for a in copied(ctx.sharding))
        grad = ops.enter_region(grads[0], spmd.text(ctx.sharding))
        return grad / copies if copies > 1 else grad, None, None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, devices: str) -> torch.Tensor:
        ctx.devices = devices
        return ops.reduce_blocks(x, "sum", devices)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return ops.reduce_blocks(grads[0], "sum", ctx.devices), None


class _Extreme(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, kind: str, devices: str) -> torch.Tensor:
        ctx.kind = kind
        return ops.reduce_blocks(x, kind, devices)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        raise NotImplementedError(f"all_reduce of {ctx.kind} in a region of manual sharding has no gradient: give it tensor.detach()")


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, count: int, devices: str) -> torch.Tensor:
        ctx.said = (dim, count, devices)
        return ops.gather_blocks(x, dim, count, devices)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return ops.scatter_blocks(grads[0], *ctx.said), None, None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, count: int, devices: str) -> torch.Tensor:
        ctx.said = (dim, count, devices)
        return ops.scatter_blocks(x, dim, count, devices)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return ops.gather_blocks(grads[0], *ctx.said), None, None, None


# -- for the names of torch_xla -------------------------------------------------------------------


def _whole(of: NamedSharding) -> NamedSharding:
    return NamedSharding(of.mesh, PartitionSpec())


def inside(t: object) -> bool:
    """Whether a tensor is one of a region."""
    if not MODE.regions:
        return False
    t = getattr(t, "global_tensor", t)  # an `xs.XLAShardedTensor`
    if not isinstance(t, XLATensor) or not t._storage.pending:
        return False
    return t._storage.vid in manual_regions.values(t._storage.segment.nodes)


def enter(t: torch.Tensor, sharding: NamedSharding) -> torch.Tensor:
    """The blocks of a tensor that is divided so. Raises ValueError if its dims cannot be, and for a mesh with another order of devices than the first one."""
    for dim, part in enumerate(sharding.spec):
        count = math.prod(sharding.mesh.shape[a] for a in (part if isinstance(part, tuple) else (part,)) if a is not None)
        if t.shape[dim] % count:
            raise ValueError(
                f"a region of manual sharding needs blocks of one shape: dim {dim} of {list(t.shape)} has {t.shape[dim]} elements, which {count} devices "
                f"({part}) do not divide. Pad the tensor, or leave the dim whole (None in the partition spec)"
            )
    if spmd.in_order(sharding) is not sharding:
        raise ValueError(
            "a region of manual sharding needs a mesh with its devices in the order of the script's first mesh: groups of device numbers would name other "
            "blocks. Give all meshes the same device_ids"
        )
    MODE.regions = True
    return _Enter.apply(t, sharding)


def leave(t: torch.Tensor, sharding: NamedSharding, size: Sequence[int]) -> torch.Tensor:
    """The tensor of this shape whose blocks, divided so, a region computed. Where several devices have the same part, it is the first one's.

    Raises RuntimeError for a tensor that is not one of a region, ValueError for a shape that the blocks do not make.
    """
    if not inside(t):
        raise RuntimeError(
            "disable_manual_sharding takes a tensor of a region of manual sharding: one that xs.enable_manual_sharding gave in this step, or that was computed "
            "from one"
        )
    block = sharding.shard_shape(tuple(size)) if len(sharding.spec) <= len(size) else ()
    if block != tuple(t.shape):
        raise ValueError(
            f"disable_manual_sharding: a tensor of shape {list(size)} divided over {dict(sharding.mesh.shape)} as {tuple(sharding.spec)} has blocks of shape "
            f"{list(block)}, and the tensor of the region has {list(t.shape)}"
        )
    return _Leave.apply(t, sharding, size)


def all_reduce(kind: str, t: torch.Tensor, scale: float, groups: Sequence[Sequence[int]] | None) -> torch.Tensor:
    """The blocks of each group of devices reduced, times `scale`. groups: of device numbers, together all devices; None: one of all."""
    text = _text("all_reduce", groups)
    if kind not in KINDS:
        raise NotImplementedError(f"all_reduce in a region of manual sharding: {kind!r} is none of {', '.join(KINDS)}")
    found = _Reduce.apply(t, text) if kind == "sum" else _Extreme.apply(t, kind, text)
    return found if scale == 1 else found * scale


def reduce_scatter(kind: str, t: torch.Tensor, scale: float, dim: int, count: int, groups: Sequence[Sequence[int]] | None) -> torch.Tensor:
    """Of the sum of each group's blocks, times `scale`, a part along `dim` for each of its `count` devices."""
    text = _text("reduce_scatter", groups, count)
    dim = _dim("reduce_scatter", t, dim)
    if kind != "sum":
        raise NotImplementedError(f"reduce_scatter in a region of manual sharding: {kind!r} is not sum")
    if t.shape[dim] % count:
        raise ValueError(f"reduce_scatter: dim {dim} of {list(t.shape)} is not divisible by {count} devices")
    found = _Scatter.apply(t, dim, count, text)
    return found if scale == 1 else found * scale


def all_gather(t: torch.Tensor, dim: int, groups: Sequence[Sequence[int]] | None) -> torch.Tensor:
    """The blocks of each group side by side along `dim`, on each of its devices."""
    count = len(groups[0]) if groups else len(spmd.devices())
    return _Gather.apply(t, _dim("all_gather", t, dim), count, _text("all_gather", groups, count))


def _dim(name: str, t: torch.Tensor, dim: int) -> int:
    if not -t.dim() <= dim < t.dim():
        raise IndexError(f"{name}: dim {dim} of a tensor of {t.dim()} dims")
    return dim % t.dim()


def _text(name: str, groups: Sequence[Sequence[int]] | None, count: int | None = None) -> str:
    """Groups as an argument of an op; empty for one group of all devices."""
    every = len(spmd.devices())
    found = [[int(k) for k in group] for group in groups] if groups else [list(range(every))]
    sizes = {len(group) for group in found}
    if sorted(k for group in found for k in group) != list(range(every)) or len(sizes) != 1 or (count is not None and sizes != {count}):
        of = "" if count is None else f" of {count}"
        raise ValueError(f"{name}: the groups of devices must have one size{of} and name each of 0 to {every - 1} once, got {found}")
    return "" if found == [list(range(every))] else json.dumps(found)
