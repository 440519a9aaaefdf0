"""Which rank holds which block of a tensor, as data."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jax.sharding import NamedSharding, PartitionSpec

from nxd_jax.tensor_parallel import full_weights
from torch_bridge.mesh import sharding as placing
from torch_bridge.mesh import spmd, world
from torch_bridge.recorder.sharded import varying

if TYPE_CHECKING:
    from nxd_jax.checkpoint.placement import Piece


@dataclass(frozen=True)
class Block:
    """A block of a tensor: from `start` up to `stop` along each dim. ranks: those that hold it, ascending."""

    start: tuple[int, ...]
    stop: tuple[int, ...]
    ranks: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Its size along each dim."""
        return tuple(b - a for a, b in zip(self.start, self.stop, strict=True))


@dataclass(frozen=True)
class Slices:
    """How ranks hold a tensor.

    Attributes:
        shape: of the global tensor, all blocks together.
        axes: for each dim the mesh axes that split it.
        blocks: every block once, in row-major order. A rank holds several where tensors are fused (gate and up; q, k and v).
        ranks: how many ranks hold something.
    """

    shape: tuple[int, ...]
    axes: tuple[tuple[str, ...], ...]
    blocks: tuple[Block, ...]
    ranks: int

    @property
    def counts(self) -> tuple[int, ...]:
        """Blocks along each dim."""
        return tuple(len({block.start[d] for block in self.blocks}) for d in range(len(self.shape)))


def slices(tensor: Any, shape: Sequence[int] | None = None) -> Slices:
    """How ranks hold a tensor.

    Of a parallel layer's weight the blocks are those of the full weight that a model without parallel ranks has, whatever the layer's stride, rank ordering,
    fused tensors or copies of K and V. A tensor that differs among ranks in a way that nobody declared has its blocks side by side along dim 0.

    Args:
        tensor: a tensor or parameter on xla (pending ops are run), or anything with a `shape` and a `jax.sharding.NamedSharding` (a `jax.Array`, a
            `ShapeDtypeStruct`), or such a sharding itself.
        shape: of the global tensor; for a sharding alone.

    Ranks are those of the current world where the devices are its; else devices are counted by their ids.

    Raises TypeError for other objects, ValueError for a sharding without a shape and for a shape that the axes do not divide.
    """
    if isinstance(tensor, torch.Tensor):
        if shape is not None:
            raise ValueError("shape= goes with a NamedSharding; a tensor has one of its own")
        return _of_tensor(tensor)
    found = tensor if isinstance(tensor, NamedSharding) else getattr(tensor, "sharding", None)
    if not isinstance(found, NamedSharding):
        raise TypeError(
            f"a {type(tensor).__name__} does not say which device holds which part: pass a tensor on xla, a jax.Array with a NamedSharding, or a NamedSharding "
            "and shape="
        )
    size = shape if tensor is found else tensor.shape
    if size is None:
        raise ValueError("a NamedSharding needs the shape of the tensor that it is for: shape=(rows, columns)")
    return _of_sharding(found, tuple(size))


def _of_tensor(tensor: torch.Tensor) -> Slices:
    how = varying(tensor)
    array = tensor._storage.held  # type: ignore[attr-defined]
    found = getattr(array, "sharding", None)
    if spmd.active():
        return _of_sharding(spmd.lies(array) or spmd.replicated(), tuple(tensor.shape))
    if not placing.active() or not isinstance(found, NamedSharding):
        ranks = np.arange(world.size())
        return split(how.global_shape, PartitionSpec(), {"ranks": len(ranks)}, ranks)
    if full_weights.is_shared_out(tensor) and (pieces := _pieces(tensor, how.axes)):
        return _of_pieces(pieces, tensor, how.axes)
    return _of_sharding(NamedSharding(found.mesh, how.spec), how.global_shape)


def _pieces(tensor: torch.Tensor, axes: Sequence[str]) -> tuple[Piece, ...]:
    """The full weights that a parameter is part of; none if ranks that hold the same part of them hold different values."""
    from nxd_jax.checkpoint import placement

    pieces = placement.of(tensor).pieces
    told = world.axes_of_table(list(zip(*(piece.part for piece in pieces), strict=True)))
    return pieces if set(told) >= set(axes) else ()


def _of_pieces(pieces: Sequence[Piece], tensor: torch.Tensor, axes: tuple[str, ...]) -> Slices:
    """A parameter that parallel ranks share out, its fused full weights one below the other."""
    dim, local = pieces[0].dim, tensor.shape
    spans: list[tuple[int, int, tuple[int, ...]]] = []
    whole = 0
    for piece in pieces:
        size = piece.rows or local[dim]
        for start, stop, part in _along(piece, size):
            spans.append((whole + start, whole + stop, tuple(r for r, p in enumerate(piece.part) if p == part)))
        whole += size * piece.count
    shape = tuple(whole if d == dim else n for d, n in enumerate(local))
    blocks = tuple(
        Block(
            tuple(start if d == dim else 0 for d in range(len(shape))), tuple(stop if d == dim else n for d, n in enumerate(shape)), ranks
        )
        for start, stop, ranks in sorted(spans)
    )
    return Slices(shape, tuple(axes if d == dim else () for d in range(len(shape))), blocks, world.size())


def _along(piece: Piece, size: int) -> Iterator[tuple[int, int, int]]:
    """(start, stop, part) of every block of a full weight along the dim in which ranks share it out, a rank holding `size` of it."""
    if piece.order is not None:  # groups of query heads, in an order of their own
        one, each = size * piece.count // len(piece.order), len(piece.order) // piece.count
        yield from ((place * one, (place + 1) * one, at // each) for at, place in enumerate(piece.order))
        return
    one = size // piece.stride
    for at in range(piece.stride * piece.count):
        yield at * one, (at + 1) * one, at % piece.count


def _of_sharding(found: NamedSharding, shape: tuple[int, ...]) -> Slices:
    mesh = found.mesh
    return split(shape, found.spec, dict(mesh.shape), _ranks(mesh.devices))


def _ranks(devices: np.ndarray) -> np.ndarray:
    """The rank of each device of a mesh."""
    wanted = list(devices.flat)
    known: dict[Any, int] = {}
    if placing.active():
        known = {placing.device_of(rank): rank for rank in range(world.size())}
    if not all(d in known for d in wanted):
        known = {d: place for place, d in enumerate(sorted(wanted, key=lambda d: d.id))}
    return np.array([known[d] for d in wanted]).reshape(devices.shape)


def split(shape: Sequence[int], spec: PartitionSpec, sizes: Mapping[str, int], ranks: np.ndarray) -> Slices:
    """The blocks of a tensor of this global shape.

    Args:
        shape: of the global tensor.
        spec: the mesh axes that split each dim.
        sizes: of the mesh axes, outermost first.
        ranks: the rank at each place of the mesh.
    """
    axes = tuple(_names(part) for part in (*spec, *[None] * (len(shape) - len(spec))))
    if len(axes) > len(shape):
        raise ValueError(f"{spec} names {len(axes)} dims, but the tensor has {len(shape)}: shape {list(shape)}")
    counts = [math.prod(sizes[a] for a in names) for names in axes]
    uneven = [f"dim {d} ({n}) over {' x '.join(axes[d])} ({counts[d]})" for d, n in enumerate(shape) if n % counts[d]]
    if uneven:
        raise ValueError(f"shape {list(shape)} is not divided by {spec}: {', '.join(uneven)}")
    inner = [n // count for n, count in zip(shape, counts, strict=True)]
    places = np.indices(tuple(sizes.values())).reshape(len(sizes), -1)
    holders: dict[tuple[int, ...], list[int]] = {}
    for place, rank in zip(places.T.tolist(), ranks.reshape(-1).tolist(), strict=True):
        holders.setdefault(_index(axes, sizes, dict(zip(sizes, place, strict=True))), []).append(rank)
    blocks = tuple(
        Block(
            tuple(i * n for i, n in zip(index, inner, strict=True)),
            tuple((i + 1) * n for i, n in zip(index, inner, strict=True)),
            tuple(sorted(holders[index])),
        )
        for index in itertools.product(*map(range, counts))
    )
    return Slices(tuple(shape), axes, blocks, ranks.size)


def _names(part: object) -> tuple[str, ...]:
    if part is None:
        return ()
    names = part if isinstance(part, tuple) else (part,)
    if not all(isinstance(name, str) for name in names):
        raise ValueError(f"{part} leaves to the compiler how a dim is split; name its mesh axes, or None")
    return names


def _index(axes: Sequence[Sequence[str]], sizes: Mapping[str, int], place: Mapping[str, int]) -> tuple[int, ...]:
    """The block that a place of the mesh holds, along each dim: the first axis of a dim counts slowest."""
    found = []
    for names in axes:
        index = 0
        for name in names:
            index = index * sizes[name] + place[name]
        found.append(index)
    return tuple(found)
