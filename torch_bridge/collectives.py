"""Collectives with torch_xla's argument conventions: what `xm.*` and the "xla" process group call.

In a world of one every collective moves nothing, but checks its arguments as a larger world would.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torch_bridge import world

REDUCTIONS = ("sum", "mul", "and", "or", "min", "max")

Tensors = list[torch.Tensor]


def all_reduce(kind: str, inputs: Any, scale: float = 1.0, groups: Any = None) -> Any:
    """Reduce over a group, then multiply by `scale`. A tensor gives a new tensor; a list is reduced in place and returned."""
    tensors = _tensors(inputs)
    _check_reduction(kind, tensors)
    world.members(groups)
    if isinstance(inputs, torch.Tensor):
        return inputs.clone() if scale == 1.0 else _scaled(inputs, scale)
    if scale != 1.0:
        with torch.no_grad():
            for t in tensors:
                t.copy_(_scaled(t, scale))
    return inputs


def all_gather(value: Any, dim: int = 0, groups: Any = None, output: Any = None) -> Any:
    """Concatenate the group's tensors along `dim`, each of a list by itself; into `output` (which is returned) if given."""
    world.members(groups)
    for t in _tensors(value):
        _check_dim(t, dim, "dim")
    return _deliver(value, output, "all_gather")


def reduce_scatter(kind: str, value: Any, scale: float, scatter_dim: int, shard_count: int, groups: Any = None, output: Any = None) -> Any:
    """Reduce over the group, multiply by `scale`, and keep this rank's part of `shard_count` parts along `scatter_dim`."""
    members = world.members(groups)
    tensors = _tensors(value)
    _check_reduction(kind, tensors)
    _check_count("shard_count", shard_count, members)
    for t in tensors:
        _check_divides(t, scatter_dim, "scatter_dim", "shard_count", shard_count)
    if scale != 1.0:
        value = _scaled(value, scale) if isinstance(value, torch.Tensor) else [_scaled(t, scale) for t in tensors]
    return _deliver(value, output, "reduce_scatter")


def all_to_all(value: torch.Tensor, split_dimension: int, concat_dimension: int, split_count: int, groups: Any = None) -> torch.Tensor:
    """Cut a tensor into `split_count` parts along one dim, send part i to member i, concatenate what arrives along another."""
    members = world.members(groups)
    (t,) = _tensors([value])
    _check_count("split_count", split_count, members)
    _check_divides(t, split_dimension, "split_dimension", "split_count", split_count)
    _check_dim(t, concat_dimension, "concat_dimension")
    return t.clone()


def permute(value: Any, pairs: Sequence[Sequence[int]]) -> Any:
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
    moved = [t.clone() if world.rank() in targets else torch.zeros_like(t) for t in _tensors(value)]
    return moved[0] if isinstance(value, torch.Tensor) else moved


def broadcast(tensors: Tensors, root: int = 0, groups: Any = None) -> None:
    """Overwrite each tensor with the root's."""
    members = world.members(groups)
    _tensors(tensors)
    if root not in members:
        raise ValueError(f"root_ordinal={root} is not in this worker's group {list(members)}")


def _tensors(inputs: Any) -> Tensors:
    found = [inputs] if isinstance(inputs, torch.Tensor) else inputs
    if not isinstance(found, (list, tuple)) or not all(isinstance(t, torch.Tensor) for t in found):
        raise TypeError(f"a collective takes a tensor or a list of tensors, got {_describe(inputs)}")
    return list(found)


def _describe(x: Any) -> str:
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


def _check_count(name: str, count: int, members: tuple[int, ...]) -> None:
    if count != len(members):
        raise ValueError(f"{name}={count} must be the number of ranks in the group, {len(members)} ({list(members)})")


def _check_divides(t: torch.Tensor, dim: int, dim_name: str, count_name: str, count: int) -> None:
    at = _check_dim(t, dim, dim_name)
    if t.shape[at] % count:
        raise ValueError(f"dimension {at} of a tensor of shape {list(t.shape)} does not divide by {count_name}={count}")


def _scaled(t: torch.Tensor, scale: float) -> torch.Tensor:
    return (t * scale).to(t.dtype)


def _deliver(value: Any, output: Any, name: str) -> Any:
    """The result as new tensors, or written into `output`."""
    if output is None:
        return value.clone() if isinstance(value, torch.Tensor) else [t.clone() for t in value]
    results, outputs = _tensors(value), _tensors(output)
    if len(results) != len(outputs):
        raise ValueError(f"{name}: {len(results)} inputs but {len(outputs)} outputs")
    for t, out in zip(results, outputs, strict=True):
        if t.shape != out.shape or t.dtype != out.dtype:
            raise ValueError(f"{name}: output must be {t.dtype} of shape {list(t.shape)}, got {out.dtype} of shape {list(out.shape)}")
    with torch.no_grad():
        for t, out in zip(results, outputs, strict=True):
            out.copy_(t)
    return output
