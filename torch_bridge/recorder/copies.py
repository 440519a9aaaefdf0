"""Copies of tensors between the CPU and xla: what `t.to("xla")`, `.cpu()` and reads of values make. Copies are real."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import numpy as np
import torch
from torch.utils.weak import WeakIdKeyDictionary

from torch_bridge import _compat
from torch_bridge.ir import dtypes
from torch_bridge.ir.layout import Layout, is_dense, layout, meta_of
from torch_bridge.ir.segment import Storage
from torch_bridge.mesh import abstract_arrays, sharding, world
from torch_bridge.precision import precision_mode
from torch_bridge.recorder import rank_tensor
from torch_bridge.recorder.tensor import XLATensor, make
from torch_bridge.runtime import transfer


class _Kept(NamedTuple):
    """What a CPU copy was read from: the array that holds all ranks' values, its layout, the view that was copied, and the copy's own layout."""

    array: jax.Array
    base: Layout
    view: Layout
    host: tuple[Any, ...]


_READ: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""By the memory of CPU copies of values that differ among ranks: where they came from, so that moving one back gives each rank its own again."""


def _keep(host: torch.Tensor, array: jax.Array, base: Layout, view: Layout) -> None:
    if sharding.active() and sharding.axes_of(sharding.spec_of(array)):
        _READ[host.untyped_storage()] = _Kept(array, base, view, _place(host))


def differs(t: torch.Tensor) -> bool:
    """Whether a plain CPU tensor is a copy of a value that differs among ranks, of which it holds the first hosted rank's."""
    return bool(len(_READ)) and t.device.type == "cpu" and t.layout == torch.strided and t.untyped_storage() in _READ


def remember(host: torch.Tensor, own: torch.Tensor) -> None:
    """Note that each rank has its own values of a CPU tensor, those of an xla tensor: until somebody writes to it, moving it back gives them."""
    array = own._storage.array  # type: ignore[attr-defined]
    _keep(host, array, own._storage.layout, own._layout)  # type: ignore[attr-defined]


def _place(t: torch.Tensor) -> tuple[Any, ...]:
    return tuple(t.shape), t.stride(), t.storage_offset(), t.dtype


def kept(t: torch.Tensor) -> XLATensor | None:
    """Each rank's own values again, as a new xla tensor, of an unchanged CPU copy of a value that differs among ranks; None for any other CPU tensor."""
    if type(t) is rank_tensor.RankTensor:
        return t.uploaded()  # type: ignore[return-value]
    found: _Kept | None = _READ.get(t.untyped_storage()) if len(_READ) and sharding.active() else None
    if found is None or found.host != _place(t):
        return None
    read = make(found.view, Storage(found.base, sharding.adopt(found.array, found.base.size)))
    first = view_of(sharding.first_block(found.array, found.base.size), read)
    if not torch.equal(first.reshape(-1).view(torch.uint8), t.detach().reshape(-1).view(torch.uint8)):  # somebody wrote to the copy
        return None
    with torch.no_grad():
        return read if found.view is found.base else read.clone(memory_format=torch.contiguous_format)  # type: ignore[return-value]


def upload(t: torch.Tensor) -> XLATensor:
    """A new xla tensor with the CPU tensor's values and strides (without the gaps and overlaps of a view, in the same order of dims)."""
    transfer._require_strided(t)
    own = kept(t)
    if own is not None:
        return own
    size = tuple(t.shape)
    if not is_dense(size, tuple(t.stride())):
        t = t.detach().clone()
    stride = tuple(t.stride())
    base = layout(size, stride if is_dense(size, stride) else None, 0, t.dtype)
    return make(base, Storage(base, transfer.to_array(t)))


def upload_blocks(blocks: list[torch.Tensor], spec: Any) -> XLATensor:
    """A new xla tensor from the hosted ranks' own CPU tensors, labelled as `spec` says."""
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


def copied(t: XLATensor) -> torch.Tensor:
    """The values of an xla tensor as a new CPU tensor, one that differs by rank where they do."""
    host = download(t)
    array, base = t._storage.array, t._storage.layout
    if array is None or not sharding.active():
        return host
    axes = sharding.axes_of(sharding.spec_of(array))
    if not axes:
        return host
    if len(world.current().hosted) == 1:
        _keep(host, array, base, t._layout)
        return host

    view = t._layout  # as it is now: the tensor may be another one when somebody asks, and need not live till then

    def parts() -> list[torch.Tensor]:
        own = [_shown(block, base, view) for block in sharding.blocks(array, base.size)]
        return [torch.empty_strided(host.shape, host.stride(), dtype=host.dtype).copy_(x) for x in own]

    return rank_tensor.RankTensor.later(host, parts, sharding.ordered(axes))


def view_of(block: Any, t: XLATensor) -> torch.Tensor:
    """What `t` shows of a block of its storage, as a CPU tensor."""
    return _shown(block, t._storage.layout, t._layout)


def _shown(block: Any, base: Layout, view: Layout) -> torch.Tensor:
    host = transfer.from_numpy(np.array(block))
    return host if view is base else _host_view(host, base, view)


def download(t: XLATensor) -> torch.Tensor:
    """The values of an xla tensor as a new CPU tensor, running what is pending first if need be; the first hosted rank's where they differ."""
    from torch_bridge.runtime import executor

    storage, view = t._storage, t._layout
    executor.materialize(storage)
    base = storage.layout
    array = storage.array
    if array is None:
        number = transfer.from_numpy(precision_mode.uploaded(transfer.to_numpy(torch.full((), storage.fill, dtype=base.dtype))))
        if view.dtype == base.dtype and not view.conj and not view.neg:  # a view shows that number too: no more is made than it shows
            return torch.empty_like(meta_of(view), device="cpu").copy_(number)
        host = torch.empty(base.size, dtype=base.dtype).copy_(number)
    else:
        host = transfer.to_cpu(array, base.size if sharding.active() else None)
    if view is not base:
        host = _host_view(host, base, view)
    elif not host.is_contiguous() or host.stride() != view.stride:
        host = torch.empty_strided(view.size, view.stride, dtype=view.dtype).copy_(host)
    return host


def _host_view(host: torch.Tensor, base: Any, view: Any) -> torch.Tensor:
    memory = torch.empty_strided(base.size, base.stride, dtype=base.dtype).copy_(host)
    flat = memory.as_strided((base.numel,), (1,), 0)
    if view.dtype != base.dtype:
        flat = _reinterpret(flat, view.dtype)
    out = flat.as_strided(view.size, view.stride, view.offset)
    if view.conj:
        out = out.conj()
    if view.neg:
        out = -out
    return out.clone().resolve_conj()


def _reinterpret(flat: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if flat.dtype.is_complex and not dtype.is_complex:
        flat = torch.view_as_real(flat).reshape(-1)
    if dtype.is_complex and not flat.dtype.is_complex:
        return torch.view_as_complex(flat.view(dtype.to_real()).reshape(-1, 2))
    return flat.view(dtype) if flat.dtype != dtype else flat


def snapshot(x: Any) -> Any:
    """An xla tensor with today's value, whatever is written into the original later; anything else as it is."""
    from torch_bridge.recorder import dispatch

    return make(x._layout, dispatch.copy_storage(x._storage)) if isinstance(x, XLATensor) else x
