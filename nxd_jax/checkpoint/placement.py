"""Which part of which full array each rank's tensor is.

A parameter that tensor-parallel ranks share out is a part of a full array along one dim. Fused parameters (gate and up; q, k and v) are several parts. Of
experts, expert-parallel ranks hold some of the array's first dim. Under ZeRO-1 a rank holds some of its rows only. Copies are stored once. So an array on
disk does not depend on how many ranks wrote it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from nxd_jax.checkpoint import heads
from nxd_jax.tensor_parallel import expert_shares, full_weights, layer_groups
from torch_bridge.collectives.row_shards import RowShards
from torch_bridge.mesh import groups, world


@dataclasses.dataclass(frozen=True)
class Experts:
    """Which block of all experts each rank holds, along dim 0. count: different blocks. part: of each rank of the world. order: the experts' numbers in the
    order in which ranks hold them, where no rank's are such a block; None: they are blocks."""

    count: int
    part: tuple[int, ...]
    order: tuple[int, ...] | None = None


@dataclasses.dataclass(frozen=True)
class Piece:
    """A stretch of a rank's tensor that is part of one full array.

    suffix: added to the name ("" if the tensor is one piece). start, rows: which rows of the tensor (rows 0: all). dim: along which ranks share the array out.
    stride: tensors fused along `dim`, each shared out by itself. count: different parts. part: of each rank of the world. order: for each group of query heads
    in the ranks' order its place in the full array (`heads.order`); None: they are in order. experts: how expert-parallel ranks share out dim 0 besides.
    """

    suffix: str
    start: int
    rows: int
    dim: int
    stride: int
    count: int
    part: tuple[int, ...]
    order: tuple[int, ...] | None = None
    experts: Experts | None = None

    @property
    def whole(self) -> bool:
        """Whether the piece is the tensor as it is."""
        return not self.rows and self.stride == 1 and self.order is None and (self.experts is None or self.experts.order is None)

    def local_shape(self, tensor: Sequence[int]) -> list[int]:
        """The shape of what a rank stores, given its tensor's: fused tensors along a dim of their own."""
        shape = [self.rows, *tensor[1:]] if self.rows else list(tensor)
        if self.stride > 1:
            shape[self.dim : self.dim + 1] = [self.stride, shape[self.dim] // self.stride]
        return shape

    @property
    def stored_dim(self) -> int:
        """The dim of what a rank stores along which parts lie side by side."""
        return self.dim + (self.stride > 1)

    def full_shape(self, tensor: Sequence[int]) -> list[int]:
        """The shape of the full array as a model without parallel ranks has it."""
        shape = [self.rows, *tensor[1:]] if self.rows else list(tensor)
        if shape:
            shape[self.dim] *= self.count
            shape[0] *= 1 if self.experts is None else self.experts.count
        return shape


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where a tensor of `shape` (as one tensor-parallel rank has it) lies.

    rows: how data-parallel ranks cut it; None: they all have it. apart: ranks hold different values, stored side by side along a first dim of its own.
    """

    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    rows: RowShards | None = None
    apart: bool = False

    def row_part(self) -> tuple[int, ...]:
        """Each rank's place among those that cut the tensor by rows."""
        return _table(self.rows.among) if self.rows is not None else (0,) * world.size()

    def parts(self) -> list[tuple[int, ...]]:
        """For each rank which part of the tensor it holds: ranks with equal ones hold the same."""
        tables = self._tables()
        return [tuple(table[r] for table in tables) for r in range(world.size())]

    def axes(self) -> set[str]:
        """The mesh axes along which ranks hold different parts."""
        return {axis for table in self._tables() for axis in world.axes_of_table(table)}

    def _tables(self) -> list[tuple[int, ...]]:
        experts = [piece.experts.part for piece in self.pieces if piece.experts is not None]
        return [self.row_part(), *(piece.part for piece in self.pieces), *experts]


def of(parameter: torch.Tensor, rows: RowShards | None = None) -> Placement:
    """The placement of a parameter, or of a tensor that is shared out like it. A number counts as one row."""
    shape = tuple(parameter.shape) or (1,)
    rows = None if rows is None or rows.size == 1 else rows
    experts = _experts(parameter)
    if not full_weights.is_shared_out(parameter):
        return Placement(shape, (dataclasses.replace(_everywhere(), experts=experts),), rows)
    firsts = [members[0] for members in groups.resolve(layer_groups.tensor_parallel()).members]
    found = [full_weights._pieces(parameter, layer_groups.tensor_parallel(), rank) for rank in firsts]
    names = ("_q", "_k", "_v") if len(found[0]) == 3 else ("",)
    held = getattr(parameter, heads.ATTRIBUTE, None)
    order = None if held is None else heads.order(held)
    pieces = []
    for k, suffix in enumerate(names):
        shares, start, size = found[0][k]
        part: dict[int, int] = {}
        for other in found:
            part.update(other[k][0].index)
        pieces.append(
            Piece(
                suffix,
                start,
                size,
                shares.dim,
                shares.stride,
                shares.count,
                tuple(part[r] for r in range(world.size())),
                None if k else order,
                experts,
            )
        )
    if experts is not None and any(piece.rows or (piece.dim == 0 and piece.stride > 1) for piece in pieces):
        raise ValueError(
            f"a parameter of shape {list(shape)} is of experts, and tensor-parallel ranks share out several tensors fused along its dim 0, which counts "
            "experts: fuse them along another dim"
        )
    return Placement(shape, tuple(pieces), rows)


def _experts(parameter: torch.Tensor) -> Experts | None:
    entries = expert_shares.entries_of(parameter)
    if entries is None:
        return None
    places = [expert_shares.place_of(entries, r) for r in range(world.size())]
    blocks = expert_shares.blocks(entries.held)
    if blocks is not None:
        return Experts(len(entries.held), tuple(blocks[place] for place in places))
    return Experts(len(entries.held), tuple(places), tuple(expert_shares.order(entries.held)))


def everywhere(shape: Sequence[int], rows: RowShards | None = None) -> Placement:
    """The placement of a tensor that all ranks hold alike."""
    return Placement(tuple(shape) or (1,), (_everywhere(),), None if rows is None or rows.size == 1 else rows)


def reduced(placement: Placement, dims: Sequence[int]) -> Placement:
    """Of a tensor that has one entry along each of `dims` in place of all that a tensor placed so has (a mean along them): ranks that share out one of these
    dims all hold it. Fused tensors along a reduced dim become one."""
    shape = tuple(1 if d in dims else n for d, n in enumerate(placement.shape))
    rows = None if 0 in dims else placement.rows
    if 0 in dims and len(placement.pieces) > 1:
        return Placement(shape, (_everywhere(),), rows)
    pieces = [dataclasses.replace(p, experts=None) if 0 in dims else p for p in placement.pieces]
    pieces = [dataclasses.replace(_everywhere(), experts=p.experts) if p.dim in dims else p for p in pieces]
    return Placement(shape, tuple(pieces), rows)


def apart(shape: Sequence[int], part: Sequence[int]) -> Placement:
    """The placement of a tensor that ranks hold different values of, for reasons of their own: rank r the block `part[r]`, stacked along a new first dim."""
    count = max(part) + 1
    return Placement((1, *shape), (Piece("", 0, 0, 0, 1, count, tuple(part)),), apart=True)


def _everywhere() -> Piece:
    return Piece("", 0, 0, 0, 1, 1, (0,) * world.size())


def _table(among: groups.Groups) -> tuple[int, ...]:
    place: Callable[[int], Any] = among.index
    return tuple(place(r) for r in range(world.size()))
