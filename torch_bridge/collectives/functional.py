"""Collectives with torch_xla's argument conventions: what `xm.*` and the "xla" process group call.

Each is recorded as one op for each tensor. In a group of one nothing moves, but arguments are checked as in a larger group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torch_bridge.mesh import groups as rank_groups
from torch_bridge.mesh import world
from torch_bridge.mesh.groups import GroupLike, Groups
from torch_bridge.mesh.spmd_mode import MODE
from torch_bridge.runtime import backend

REDUCTIONS = ("sum", "mul", "and", "or", "min", "max")

Tensors = list[torch.Tensor]


def all_reduce(kind: str, inputs: torch.Tensor | Tensors, scale: float = 1.0, groups: GroupLike = None) -> Any:
    """Reduce over a group, then multiply by `scale`. A tensor gives a new tensor; a list is reduced in place and returned."""
    tensors = _tensors(inputs)
    _check_reduction(kind, tensors)
    among = rank_groups.resolve(groups)
    if isinstance(inputs, torch.Tensor):
        return _reduced(inputs, kind, scale, among)
    if scale != 1.0 or among.size > 1:
        with torch.no_grad():
            for t, reduced in zip(tensors, [_reduced(t, kind, scale, among) for t in tensors], strict=True):
                t.copy_(reduced)
    return inputs


def all_gather(value: torch.Tensor | Tensors, dim: int = 0, groups: GroupLike = None, output: torch.Tensor | Tensors | None = None) -> Any:
    """Concatenate the group's tensors along `dim`, each of a list by itself; into `output` (which is returned) if given."""
    among = rank_groups.resolve(groups)
    dims = [_check_dim(t, dim, "dim") for t in _tensors(value)]
    gathered = [
        t.clone() if among.size == 1 else _emit("all_gather", t, (at, among.size, among.text))
        for t, at in zip(_tensors(value), dims, strict=True)
    ]
    return _deliver(value, gathered, output, "all_gather")


def reduce_scatter(
    kind: str,
    value: torch.Tensor | Tensors,
    scale: float,
    scatter_dim: int,
    shard_count: int,
    groups: GroupLike = None,
    output: torch.Tensor | Tensors | None = None,
) -> Any:
    """Reduce over the group, multiply by `scale`, and keep this rank's part of `shard_count` parts along `scatter_dim`."""
    among = rank_groups.resolve(groups)
    tensors = _tensors(value)
    _check_reduction(kind, tensors)
    _check_count("shard_count", shard_count, among)
    dims = [_check_divides(t, scatter_dim, "scatter_dim", "shard_count", shard_count) for t in tensors]
    parts = [
        t.clone() if among.size == 1 else _emit("reduce_scatter", t, (kind, at, shard_count, among.text))
        for t, at in zip(tensors, dims, strict=True)
    ]
    if scale != 1.0:
        parts = [_scaled(t, scale) for t in parts]
    return _deliver(value, parts, output, "reduce_scatter")


def all_to_all(
    value: torch.Tensor, split_dimension: int, concat_dimension: int, split_count: int, groups: GroupLike = None
) -> torch.Tensor:
    """Cut a tensor into `split_count` parts along one dim, send part i to member i, concatenate what arrives along another."""
    among = rank_groups.resolve(groups)
    (t,) = _tensors([value])
    _check_count("split_count", split_count, among)
    split = _check_divides(t, split_dimension, "split_dimension", "split_count", split_count)
    concat = _check_dim(t, concat_dimension, "concat_dimension")
    return t.clone() if among.size == 1 else _emit("all_to_all", t, (split, concat, split_count, among.text))


def permute(value: torch.Tensor | Tensors, pairs: Sequence[Sequence[int]]) -> Any:
    """Send along (source, target) pairs; a rank that is no target gets zeros."""
    ranks = range(world.size())
    sources, targets = [], []
    for pair in pairs:
        if len(pair) != 2 or not all(type(r) is int and r in ranks for r in pair):
            raise ValueError(f"pairs must be [source, target] ranks below {len(ranks)}, got {pair!r} in {pairs!r}")
        sources.append(pair[0])
        targets.append(pair[1])
    if len(set(sources)) != len(sources) or len(set(targets)) != len(targets):
        raise ValueError(f"pairs={pairs!r} name a rank twice as source or as target")
    if len(ranks) > 1:
        text = str([list(pair) for pair in zip(sources, targets, strict=True)])
        moved = [_emit("permute", t, (text,)) for t in _tensors(value)]
    else:
        moved = [t.clone() if targets else torch.zeros_like(t) for t in _tensors(value)]
    return moved[0] if isinstance(value, torch.Tensor) else moved


def broadcast(tensors: Tensors, root: int = 0, groups: GroupLike = None) -> None:
    """Overwrite each tensor with the root's."""
    among = rank_groups.resolve(groups)
    found = _tensors(tensors)
    if root not in among.of(world.first()):
        raise ValueError(f"root_ordinal={root} is not in this worker's group {list(among.of(world.first()))}")
    if among.size > 1:
        broadcast_from(found, among.index(root), among)


def broadcast_from(tensors: Tensors, place: int, among: Groups) -> None:
    """Overwrite each tensor with that of the member at a place in its group."""
    with torch.no_grad():
        for t in tensors:
            t.copy_(_emit("broadcast", t, (place, among.text)))


def _emit(name: str, t: torch.Tensor, args: tuple[Any, ...]) -> torch.Tensor:
    """Record a collective on an xla tensor."""
    from torch_bridge.collectives import collective_ops
    from torch_bridge.recorder import placed

    backend.ensure()

    if t.device.type != "xla":
        raise ValueError(f"{name}: ranks exchange tensors on xla, got one of shape {list(t.shape)} on {t.device}; move it with .to('xla')")
    return collective_ops.emit(getattr(collective_ops.ops, name).default, (placed.for_ranks(t.detach(), args[-1]),), args)


def _reduced(t: torch.Tensor, kind: str, scale: float, among: Groups) -> torch.Tensor:
    if among.size == 1:
        return t.clone() if scale == 1.0 else _scaled(t, scale)
    out = _emit("all_reduce", t, (kind, among.loose_text))
    return out if scale == 1.0 else _scaled(out, scale)


def _tensors(inputs: object) -> Tensors:
    found = [inputs] if isinstance(inputs, torch.Tensor) else inputs
    if not isinstance(found, (list, tuple)) or not all(isinstance(t, torch.Tensor) for t in found):
        raise TypeError(f"a collective takes a tensor or a list of tensors, got {_describe(inputs)}")
    if MODE.regions:
        _check_outside(found)
    return list(found)


def _check_outside(tensors: Sequence[torch.Tensor]) -> None:
    """Ranks have no part in a region of manual sharding: there collectives are between devices."""
    from torch_bridge.recorder import manual_regions

    if any(manual_regions.inside(t) for t in tensors):
        raise NotImplementedError(
            "this collective of tensors in a region of manual sharding: of a tensor (no list, and without output=) xm.all_reduce, xm.reduce_scatter and "
            "xm.all_gather work there, with groups of device numbers"
        )


def _describe(x: object) -> str:
    if isinstance(x, (list, tuple)):
        return f"{type(x).__name__} of {', '.join(sorted({type(e).__name__ for e in x}))}"
    return type(x).__name__


def _check_reduction(kind: str, tensors: Tensors) -> None:
    if kind not in REDUCTIONS:
        raise ValueError(f"reduce_type must be one of {', '.join(REDUCTIONS)}, got {kind!r}")
    for t in tensors:
        if kind in ("and", "or") and (t.is_floating_point() or t.is_complex()):
            raise ValueError(f"reduce_type '{kind}' needs integer or bool tensors, got {t.dtype} of shape {list(t.shape)}")
        if kind in ("min", "max") and t.is_complex():
            raise ValueError(f"reduce_type '{kind}' has no meaning for {t.dtype}")


def _check_dim(t: torch.Tensor, dim: int, name: str) -> int:
    if not -t.dim() <= dim < t.dim():
        raise IndexError(
            f"{name}={dim} is out of range for a tensor of shape {list(t.shape)}" + ("; reshape(1) it first" if not t.dim() else "")
        )
    return dim % t.dim()


def _check_count(name: str, count: int, among: Groups) -> None:
    if count != among.size:
        raise ValueError(f"{name}={count} must be the number of ranks in the group, {among.size} ({list(among.of(world.first()))})")


def _check_divides(t: torch.Tensor, dim: int, dim_name: str, count_name: str, count: int) -> int:
    at = _check_dim(t, dim, dim_name)
    if t.shape[at] % count:
        raise ValueError(f"dimension {at} of a tensor of shape {list(t.shape)} does not divide by {count_name}={count}")
    return at


def _scaled(t: torch.Tensor, scale: float) -> torch.Tensor:
    return (t * scale).to(t.dtype)


def _deliver(value: torch.Tensor | Tensors, results: Tensors, output: torch.Tensor | Tensors | None, name: str) -> Any:
    """The results as new tensors, one if `value` is one, or written into `output`."""
    if output is None:
        return results[0] if isinstance(value, torch.Tensor) else results
    outputs = _tensors(output)
    if len(results) != len(outputs):
        raise ValueError(f"{name}: {len(results)} inputs but {len(outputs)} outputs")
    for t, out in zip(results, outputs, strict=True):
        if t.shape != out.shape or t.dtype != out.dtype:
            raise ValueError(f"{name}: output must be {t.dtype} of shape {list(t.shape)}, got {out.dtype} of shape {list(out.shape)}")
    with torch.no_grad():
        for t, out in zip(results, outputs, strict=True):
            out.copy_(t)
    return output
