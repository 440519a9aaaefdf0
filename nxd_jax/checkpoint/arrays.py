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
from nxd_jax.tensor_parallel import layer_groups
from torch_bridge import _compat
from torch_bridge.collectives import functional, rank_slices
from torch_bridge.ir import dtypes
from torch_bridge.ir.layout import layout
from torch_bridge.ir.segment import Storage
from torch_bridge.mesh import groups, places, sharding, world
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

    def sharding(self, ranks: Sequence[int] | None = None) -> NamedSharding:
        """The full array's: a mesh of the devices of these ranks (default: all), sorted by the blocks that they hold.

        Raises ValueError if some block is held more often than others.
        """
        dims = sorted(self.places)
        counts = [self.places[d][1] for d in dims]
        holders: dict[tuple[int, ...], list[Any]] = {}
        for rank in range(world.size()) if ranks is None else ranks:
            holders.setdefault(tuple(self.places[d][0][rank] for d in dims), []).append(_device(rank))
        copies = {len(found) for found in holders.values()}
        if len(copies) != 1 or len(holders) != math.prod(counts):
            raise ValueError(f"ranks hold blocks of an array unevenly: {sorted(holders)} of {counts}")
        names = [f"dim{d}" for d in dims]
        grid = np.array([holders[key] for key in sorted(holders)]).reshape(*counts, copies.pop())
        return NamedSharding(
            Mesh(grid, (*names, "copy")), PartitionSpec(*[f"dim{d}" if d in self.places else None for d in range(len(self.local))])
        )

    def axes(self) -> tuple[str, ...]:
        """The mesh axes along which ranks hold different blocks."""
        return world.axes_of_table([tuple(table[r] for table, _ in self.places.values()) for r in range(world.size())])

    def target(self, dtype: Any) -> jax.ShapeDtypeStruct:
        """What to restore."""
        return jax.ShapeDtypeStruct(self.shape, dtype, sharding=self.sharding())


def _device(rank: int) -> Any:
    return sharding.device_of(rank) if sharding.active() else jax.devices()[0]


# -- out of ranks ------------------------------------------------------------------------------------


def blocks(placement: Placement) -> list[Blocks]:
    """For every piece: how its full array is made."""
    return [_blocks(placement, piece) for piece in placement.pieces]


def _blocks(placement: Placement, piece: Piece) -> Blocks:
    local = piece.local_shape(placement.shape)
    places: dict[int, tuple[tuple[int, ...], int]] = {}
    if piece.count > 1:
        places[piece.stored_dim] = piece.part, piece.count
    dim = _row_dim(placement, piece, local)
    if dim is not None:
        rows = placement.rows
        assert rows is not None
        place = placement.row_part()
        local[dim] = math.ceil(local[dim] / rows.size)
        before, count = places.get(dim, ((0,) * world.size(), 1))
        places[dim] = tuple(b * rows.size + r for b, r in zip(before, place, strict=True)), count * rows.size
    return Blocks(tuple(local), places)


def _row_dim(placement: Placement, piece: Piece, local: Sequence[int]) -> int | None:
    """The dim along which a piece's rows are cut among data-parallel ranks: None if they are not, or do not divide and the rows are shared out over
    tensor-parallel ranks too (padding would come in between)."""
    if placement.rows is None:
        return None
    dim = piece.stored_dim if piece.dim == 0 and piece.stride > 1 else 0
    if local[dim] % placement.rows.size == 0 or (piece.whole and piece.count == 1) or (piece.whole and piece.dim != 0):
        return dim
    return None


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
        return [_own(tensor)]
    rows = placement.rows
    if rows is not None:
        (tensor,) = rows.all_gather([tensor], [placement.shape], tensor.dtype)
    found = []
    for piece in placement.pieces:
        part = tensor.narrow(0, piece.start, piece.rows) if piece.rows else tensor
        if piece.order is not None:
            part = _exchanged(part, piece, [piece.order.index(k) for k in range(len(piece.order))])
        local = piece.local_shape(placement.shape)
        part = part.reshape(local)
        dim = _row_dim(placement, piece, local)
        if dim is not None and rows is not None:
            part = rows.cut(part.transpose(0, dim)).transpose(0, dim) if dim else rows.cut(part)
        found.append(_own(part.contiguous()))
    return found


def _exchanged(part: torch.Tensor, piece: Piece, order: Sequence[int]) -> torch.Tensor:
    """What a rank holds once the tensor-parallel ranks' groups of query heads are in another order: place k gets group `order[k]`."""
    group = layer_groups.tensor_parallel()
    full = functional.all_gather(part.contiguous(), piece.dim, group)
    rows = torch.arange(full.shape[piece.dim]).reshape(len(order), -1)[list(order)].reshape(-1)
    among = groups.resolve(group)
    starts = [among.index(r) * part.shape[piece.dim] for r in range(world.size())]
    return rank_slices.ops.rank_slice(full.index_select(piece.dim, rows.to("xla")), piece.dim, starts, part.shape[piece.dim])


def _own(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, its values lying in memory as it shows them."""
    whole = tensor._layout is tensor._storage.layout and tensor.is_contiguous()  # type: ignore[attr-defined]
    return tensor if whole else tensor.contiguous().clone()


def full_array(piece: torch.Tensor, how: Blocks) -> jax.Array:
    """The full array of a piece that has run; it shares memory with the piece."""
    storage = piece._storage  # type: ignore[attr-defined]
    executor.materialize(storage)
    array = storage.array
    with _compat.enable_x64():
        if array is None:  # full of one number, and not in memory yet
            filled = np.full(how.local, storage.fill, dtypes.to_jax(storage.layout.dtype))
            parts = [jax.device_put(filled, _device(r)) for r in world.current().hosted]
        else:
            array = sharding.adopt(array, storage.layout.size) if sharding.active() else array
            by_device = {s.device: s.data for s in array.addressable_shards}
            narrow = places.ranks(array.sharding.mesh) if places.in_use() and isinstance(array.sharding, NamedSharding) else None
            parts = [by_device[_device(r)] for r in (world.current() if narrow is None else narrow).hosted]
            parts = [p if p.shape == how.local else p.reshape(how.local) for p in parts]
            if narrow is not None:
                return jax.make_array_from_single_device_arrays(how.shape, how.sharding(sorted(narrow.order)), parts)
        return jax.make_array_from_single_device_arrays(how.shape, how.sharding(), parts)


# -- into ranks --------------------------------------------------------------------------------------


def piece_tensor(array: jax.Array, how: Blocks, dtype: torch.dtype) -> XLATensor:
    """A rank's block of a restored array, as an xla tensor."""
    if not sharding.active():
        placed = array.addressable_shards[0].data
        return make(layout(how.local, None, 0, dtype), Storage(layout(how.local, None, 0, dtype), placed))
    spec = sharding.spec_for(how.axes(), next(iter(how.places), 0))
    base = layout(how.local, None, 0, dtype)
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
        found.append(part if piece.order is None else _exchanged(part, piece, piece.order))
    tensor = found[0] if len(found) == 1 else torch.cat(found)
    return rows.cut(tensor) if rows is not None else tensor


def _swapped(shape: Sequence[int], dim: int) -> list[int]:
    found = list(shape)
    found[0], found[dim] = found[dim], found[0]
    return found


def torch_dtype(array: Any) -> torch.dtype:
    """The torch dtype of an array or of what describes one."""
    return dtypes.to_torch(np.dtype(array.dtype))
