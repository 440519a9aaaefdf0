"""Full `jax.Array`s out of what ranks hold, and back. Where a rank's tensor is a block of the full array, nothing is copied or moved."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import torch
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from nxd_jax.checkpoint.placement import Piece, Placement
from nxd_jax.tensor_parallel import layer_groups, parallel_groups
from torch_bridge import _compat
from torch_bridge.collectives import functional, rank_slices
from torch_bridge.ir import dtypes
from torch_bridge.ir.layout import layout
from torch_bridge.ir.segment import Storage
from torch_bridge.mesh import groups, places, sharding, world
from torch_bridge.mesh.groups import GroupLike
from torch_bridge.mesh.places import Place
from torch_bridge.recorder import placed
from torch_bridge.recorder.tensor import XLATensor, make
from torch_bridge.runtime import executor


@dataclasses.dataclass(frozen=True)
class Blocks:
    """How the ranks' blocks make a full array: along each dim, which block every rank holds and how many there are.

    local: the shape of a block. places: for the dims that are cut, (each rank's block, number of blocks).
    """

    local: tuple[int, ...]
    places: dict[int, tuple[tuple[int, ...], int]]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the full array (rows that pad it included)."""
        return tuple(n * self.places[d][1] if d in self.places else n for d, n in enumerate(self.local))

    def sharding(self, ranks: Sequence[int] | None = None, spare: Sequence[int] = ()) -> NamedSharding:
        """The full array's: a mesh of the devices of these ranks (default: all), sorted by the blocks that they hold.

        spare: ranks that are given the last copy of each block, in order; they need not have it. Raises ValueError if blocks are not held equally often.
        """
        dims = sorted(self.places)
        counts = [self.places[d][1] for d in dims]
        holders: dict[tuple[int, ...], list[Any]] = {}
        for rank in range(world.size()) if ranks is None else ranks:
            holders.setdefault(tuple(self.places[d][0][rank] for d in dims), []).append(device(rank))
        copies = {len(found) for found in holders.values()}
        if len(copies) != 1 or len(holders) != math.prod(counts):
            raise ValueError(f"ranks hold blocks of an array unevenly: {sorted(holders)} of {counts}")
        for key, rank in zip(sorted(holders), spare, strict=False):
            holders[key].append(device(rank))
        names = [f"dim{d}" for d in dims]
        grid = np.array([holders[key] for key in sorted(holders)]).reshape(*counts, copies.pop() + bool(spare))
        return NamedSharding(
            Mesh(grid, (*names, "copy")), PartitionSpec(*[f"dim{d}" if d in self.places else None for d in range(len(self.local))])
        )

    @property
    def count(self) -> int:
        """How many blocks there are."""
        return math.prod(count for _, count in self.places.values())

    def cuts(self) -> dict[int, tuple[str, ...]]:
        """By dim the mesh axes along which ranks hold different blocks."""
        found: dict[int, tuple[str, ...]] = {}
        for dim, (table, _) in self.places.items():
            taken = {a for axes in found.values() for a in axes}
            found[dim] = tuple(a for a in world.axes_of_table(table) if a not in taken)
        return found

    def target(self, dtype: Any, home: Place | None = None) -> jax.ShapeDtypeStruct:
        """What to restore. home: where; None: for all ranks."""
        return jax.ShapeDtypeStruct(self.shape, dtype, sharding=self.sharding(_ranks_at(home)))


def device(rank: int) -> Any:
    """The device of a rank."""
    return sharding.device_of(rank) if sharding.active() else jax.devices()[0]


def _ranks_at(home: Place | None) -> Sequence[int] | None:
    narrow = None if home is None else places.ranks(home.mesh)
    return None if narrow is None else sorted(narrow.order)


# -- out of ranks ------------------------------------------------------------------------------------


def blocks(placement: Placement) -> list[Blocks]:
    """For every piece: how its full array is made."""
    return [_blocks(placement, piece) for piece in placement.pieces]


def _blocks(placement: Placement, piece: Piece) -> Blocks:
    local = piece.local_shape(placement.shape)
    places: dict[int, tuple[tuple[int, ...], int]] = {}
    if piece.count > 1:
        places[piece.stored_dim] = piece.part, piece.count
    if piece.experts is not None:
        _divide(places, 0, piece.experts.part, piece.experts.count, outer=True)
    dim = _row_dim(placement, piece, local)
    if dim is not None:
        rows = placement.rows
        assert rows is not None
        local[dim] = math.ceil(local[dim] / rows.size)
        _divide(places, dim, placement.row_part(), rows.size)
    return Blocks(tuple(local), places)


def _divide(places: dict[int, tuple[tuple[int, ...], int]], dim: int, part: Sequence[int], count: int, outer: bool = False) -> None:
    """Cut a dim besides: each block into `count` smaller ones (outer: `count` larger ones, each of which consists of the blocks that there were)."""
    before, there = places.get(dim, ((0,) * world.size(), 1))
    pairs = zip(before, part, strict=True)
    places[dim] = tuple(p * there + b if outer else b * count + p for b, p in pairs), count * there


def _row_dim(placement: Placement, piece: Piece, local: Sequence[int]) -> int | None:
    """The dim along which a piece's rows are cut among data-parallel ranks: None if they are not, or do not divide and the rows are shared out over
    tensor- or expert-parallel ranks too (padding would come in between)."""
    if placement.rows is None:
        return None
    dim = piece.stored_dim if piece.dim == 0 and piece.stride > 1 else 0
    if local[dim] % placement.rows.size == 0:
        return dim
    return dim if piece.whole and piece.experts is None and (piece.count == 1 or piece.dim != 0) else None


def _as_it_is(placement: Placement) -> bool:
    """Whether what a rank holds is a block of the full array."""
    piece = placement.pieces[0]
    if len(placement.pieces) > 1 or not piece.whole:
        return False
    return placement.rows is None or _row_dim(placement, piece, list(placement.shape)) == 0


@torch.no_grad()
def pieces_of(tensor: torch.Tensor, placement: Placement) -> list[torch.Tensor]:
    """A rank's pieces of an xla tensor, in the shape in which they are stored; recorded, not yet run."""
    tensor = tensor.detach()
    tensor = tensor if tensor.dim() else tensor.reshape(1)
    if _as_it_is(placement):
        return [own(tensor)]
    rows = placement.rows
    if rows is not None:
        (tensor,) = rows.all_gather([tensor], [placement.shape], tensor.dtype)
    found = []
    for piece in placement.pieces:
        part = tensor.narrow(0, piece.start, piece.rows) if piece.rows else tensor
        if piece.order is not None:
            part = _exchanged(part, piece.dim, layer_groups.tensor_parallel(), _inverse(piece.order))
        if piece.experts is not None and piece.experts.order is not None:
            part = _exchanged(part, 0, parallel_groups.group("ep"), _inverse(piece.experts.order))
        local = piece.local_shape(placement.shape)
        part = part.reshape(local)
        dim = _row_dim(placement, piece, local)
        if dim is not None and rows is not None:
            part = rows.cut(part.transpose(0, dim)).transpose(0, dim) if dim else rows.cut(part)
        found.append(own(part.contiguous()))
    return found


def _exchanged(part: torch.Tensor, dim: int, group: GroupLike, order: Sequence[int]) -> torch.Tensor:
    """What a rank holds once the stretches of a dim that the ranks of a group have (groups of query heads, experts) are in another order: place k gets
    stretch `order[k]`."""
    full = functional.all_gather(part.contiguous(), dim, group)
    rows = torch.arange(full.shape[dim]).reshape(len(order), -1)[list(order)].reshape(-1)
    among = groups.resolve(group)
    starts = [among.index(r) * part.shape[dim] for r in range(world.size())]
    return rank_slices.ops.rank_slice(full.index_select(dim, rows.to("xla")), dim, starts, part.shape[dim])


def _inverse(order: Sequence[int]) -> list[int]:
    return [order.index(k) for k in range(len(order))]


def own(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, its values lying in memory as it shows them."""
    whole = tensor._layout is tensor._storage.layout and tensor.is_contiguous()  # type: ignore[attr-defined]
    return tensor if whole else tensor.contiguous().clone()


@dataclasses.dataclass
class Held:
    """What this process has of a full array. home: the place that it lies at; None on the whole mesh. blocks: of this process's ranks there."""

    how: Blocks
    home: Place | None
    blocks: list[jax.Array]

    def full(self) -> jax.Array:
        """The array, where all processes have their part of it. It shares memory with the blocks."""
        with _compat.enable_x64():
            return jax.make_array_from_single_device_arrays(self.how.shape, self.how.sharding(_ranks_at(self.home)), self.blocks)


def held(piece: torch.Tensor, how: Blocks) -> Held:
    """The blocks of a piece that has run; they share memory with it."""
    storage = piece._storage  # type: ignore[attr-defined]
    executor.materialize(storage)
    array = storage.array
    with _compat.enable_x64():
        if array is None:  # full of one number, and not in memory yet
            home = placed.place_of(piece)
            filled = np.full(how.local, storage.fill, dtypes.to_jax(storage.layout.dtype))
            return Held(how, home, [jax.device_put(filled, device(r)) for r in _hosted(home)])
        array = sharding.adopt(array, storage.layout.size) if sharding.active() else array
        by_device = {s.device: s.data for s in array.addressable_shards}
        home = places.of(array) if places.in_use() else None
        blocks = [by_device[device(r)] for r in _hosted(home)]
        return Held(how, home, [b if b.shape == how.local else b.reshape(how.local) for b in blocks])


def _hosted(home: Place | None) -> Sequence[int]:
    narrow = None if home is None else places.ranks(home.mesh)
    return (world.current() if narrow is None else narrow).hosted


# -- into ranks --------------------------------------------------------------------------------------


def piece_tensor(array: jax.Array, how: Blocks, dtype: torch.dtype, home: Place | None = None) -> XLATensor:
    """A rank's block of a restored array, as an xla tensor. home: where it lies; None on the whole mesh."""
    base = layout(how.local, None, 0, dtype)
    if not sharding.active():
        return make(base, Storage(base, array.addressable_shards[0].data))
    spec = sharding.spec_for(how.cuts())
    spec = spec if home is None else places.label_at(spec, home)
    with places.at(home):
        storage = Storage(base, sharding.relabel(array, how.local, spec))
    storage.describe(spec=spec)
    return make(base, storage)


@torch.no_grad()
def joined(parts: Sequence[torch.Tensor], placement: Placement) -> torch.Tensor:
    """The tensor that a rank holds, from its pieces; recorded, not yet run. Its shape is the placement's, or that of its rows."""
    if _as_it_is(placement):
        return parts[0]
    rows = placement.rows
    found = []
    for piece, part in zip(placement.pieces, parts, strict=True):
        local = piece.local_shape(placement.shape)
        dim = _row_dim(placement, piece, local)
        if dim is not None and rows is not None:
            (part,) = rows.all_gather([part.transpose(0, dim).contiguous()], [_swapped(local, dim)], part.dtype)
            part = part.transpose(0, dim)
        shape = [piece.rows, *placement.shape[1:]] if piece.rows else list(placement.shape)
        part = part.reshape(shape)
        if piece.experts is not None and piece.experts.order is not None:
            part = _exchanged(part, 0, parallel_groups.group("ep"), piece.experts.order)
        found.append(part if piece.order is None else _exchanged(part, piece.dim, layer_groups.tensor_parallel(), piece.order))
    tensor = found[0] if len(found) == 1 else torch.cat(found)
    return rows.cut(tensor) if rows is not None else tensor


def _swapped(shape: Sequence[int], dim: int) -> list[int]:
    found = list(shape)
    found[0], found[dim] = found[dim], found[0]
    return found


def torch_dtype(array: Any) -> torch.dtype:
    """The torch dtype of an array or of what describes one."""
    return dtypes.to_torch(np.dtype(array.dtype))


def jax_dtype(name: str) -> Any:
    """JAX's dtype of torch's name of one."""
    return dtypes.to_jax(getattr(torch, name))
