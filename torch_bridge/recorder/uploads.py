"""CPU tensors as new xla tensors: one for all ranks, or one for each. And the note on a CPU copy of values that differ among ranks of where they came from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import torch
from torch.utils.weak import WeakIdKeyDictionary

from torch_bridge import _compat
from torch_bridge.ir import dtypes
from torch_bridge.ir.layout import Layout, is_dense, layout
from torch_bridge.ir.segment import Storage
from torch_bridge.mesh import abstract_arrays, sharding, spmd, world
from torch_bridge.precision import precision_mode
from torch_bridge.recorder.downloads import view_of_block
from torch_bridge.recorder.tensor import XLATensor, make
from torch_bridge.recorder.varying import Stored
from torch_bridge.runtime import transfer

if TYPE_CHECKING:
    from jax.sharding import NamedSharding, PartitionSpec


def upload_plain(t: torch.Tensor) -> XLATensor:
    """The same values on all ranks, with the strides of `t` (without the gaps and overlaps of a view, in the same order of dims)."""
    transfer._require_strided(t)
    size = tuple(t.shape)
    if not is_dense(size, tuple(t.stride())):
        t = t.detach().clone()
    stride = tuple(t.stride())
    base = layout(size, stride if is_dense(size, stride) else None, 0, t.dtype)
    return make(base, Storage(base, transfer.to_array(t)))


def upload_blocks(blocks: list[torch.Tensor], spec: PartitionSpec) -> XLATensor:
    """The hosted ranks' own CPU tensors, labelled as `spec` says."""
    base = layout(tuple(blocks[0].shape), None, 0, blocks[0].dtype)
    hosts: dict[int, Any] = {}
    if abstract_arrays.active():
        storage = Storage(base, abstract_arrays.blocks(base.size, dtypes.to_jax(base.dtype), spec))
        storage.describe(spec=spec)
        return make(base, storage)
    for t in blocks:
        if t.dtype != blocks[0].dtype or t.shape != blocks[0].shape:
            raise ValueError(
                f"every rank needs a tensor of the same shape and dtype, got {blocks[0].dtype}{list(blocks[0].shape)} and {t.dtype}{list(t.shape)}"
            )
        if id(t) not in hosts:
            hosts[id(t)] = precision_mode.uploaded(transfer.to_numpy(t)).copy()
    with _compat.enable_x64():
        array = sharding.from_blocks([hosts[id(t)] for t in blocks], spec)
    if transfer.WITNESS is not None:
        transfer.WITNESS(array, blocks)
    storage = Storage(base, array)
    storage.describe(spec=spec)
    return make(base, storage)


def from_processes(part: torch.Tensor, target: NamedSharding) -> XLATensor:
    """With annotations: the tensor of which each process has a part, one after the other along dim 0."""
    host = precision_mode.uploaded(transfer.to_numpy(part)).copy()
    array = spmd.from_parts(host, target)
    storage = Storage(layout(tuple(array.shape), None, 0, part.dtype), array)
    storage.describe(spec=target)
    return make(storage.layout, storage)


def from_ranks(of: Callable[[int], torch.Tensor], axes: Iterable[str] | sharding.Cuts | None = None, dim: int = 0) -> XLATensor:
    """An xla tensor whose value on each rank is `of(rank)`, a CPU tensor (called once for each distinct place along `axes`).

    axes: mesh axes along which the values differ; None: all of them. dim: along which the blocks lie side by side in the global array; if along several
    dims, `axes` is a dict from dim to axes.
    """
    cuts: sharding.Cuts = axes if isinstance(axes, Mapping) else {dim: world.current().axes if axes is None else axes}
    names = sharding.ordered(a for own in cuts.values() for a in own)
    places = [world.coordinates(a) for a in names]
    made: dict[tuple[int, ...], torch.Tensor] = {}
    blocks = []
    for rank in world.current().hosted:
        place = tuple(p[rank] for p in places)
        if place not in made:
            made[place] = of(rank)
        blocks.append(made[place])
    if not sharding.active():
        return upload_plain(blocks[0])
    spec = sharding.spec_for(cuts if blocks[0].dim() else names)
    return upload_blocks(blocks, spec)


# -- copies that remember ---------------------------------------------------------------------------


class _Source(NamedTuple):
    """What a CPU copy was read from: the array that holds all ranks' values, its layout, the view that was copied, and the copy's own layout."""

    array: jax.Array
    base: Layout
    view: Layout
    host: tuple[Any, ...]


_SOURCES: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""By the memory of CPU copies of values that differ among ranks: where they came from, so that moving one back gives each rank its own again."""


def remember(host: torch.Tensor, own: Stored) -> None:
    """Note that a CPU tensor is a copy of an xla tensor: if ranks have different values, moving the copy back gives them, until somebody writes to it."""
    array, base, view = own._storage.array, own._storage.layout, own._layout
    if sharding.active() and sharding.axes_of(sharding.spec_of(array)):
        _SOURCES[host.untyped_storage()] = _Source(array, base, view, _place(host))


def _place(t: torch.Tensor) -> tuple[Any, ...]:
    return tuple(t.shape), t.stride(), t.storage_offset(), t.dtype


def remembers(t: torch.Tensor) -> bool:
    """Whether a plain CPU tensor is a copy of a value that differs among ranks, of which it holds the first hosted rank's."""
    return bool(len(_SOURCES)) and t.device.type == "cpu" and t.layout == torch.strided and t.untyped_storage() in _SOURCES


def remembered(t: torch.Tensor) -> XLATensor | None:
    """Each rank's own values again, as a new xla tensor, of an unchanged CPU copy of a value that differs among ranks; None for any other plain CPU tensor."""
    found: _Source | None = _SOURCES.get(t.untyped_storage()) if len(_SOURCES) and sharding.active() else None
    if found is None or found.host != _place(t):
        return None
    read = make(found.view, Storage(found.base, sharding.adopt(found.array, found.base.size)))
    first = view_of_block(sharding.first_block(found.array, found.base.size), found.base, found.view)
    if not torch.equal(first.reshape(-1).view(torch.uint8), t.detach().reshape(-1).view(torch.uint8)):  # somebody wrote to the copy
        return None
    with torch.no_grad():
        return read if found.view is found.base else read.clone(memory_format=torch.contiguous_format)  # type: ignore[return-value]
