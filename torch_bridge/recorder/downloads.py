"""Values of xla tensors as new CPU tensors: the first hosted rank's, or every rank's. Runs what is pending."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import torch

from torch_bridge.ir.layout import Layout, meta_of
from torch_bridge.mesh import sharding, world
from torch_bridge.precision import precision_mode
from torch_bridge.recorder.varying import Stored, computed, differs
from torch_bridge.runtime import executor, transfer


def download(t: Stored) -> torch.Tensor:
    """The values of an xla tensor; the first hosted rank's where they differ."""
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
        host = _view_of_host(host, base, view)
    elif not host.is_contiguous() or host.stride() != view.stride:
        host = torch.empty_strided(view.size, view.stride, dtype=view.dtype).copy_(host)
    return host


def each_ranks(t: torch.Tensor) -> list[torch.Tensor]:
    """Every hosted rank's values of an xla tensor, in rank order."""
    storage = computed(t)
    if storage.held is None or not sharding.active():
        return [t.detach().cpu()] * len(world.current().hosted)
    view: Layout = t._layout  # type: ignore[attr-defined]
    return [view_of_block(block, storage.layout, view) for block in sharding.blocks(storage.array, storage.layout.size)]


def each_ranks_number(t: Any) -> tuple[Any, ...]:
    """The number in a one-element xla tensor that has been computed, on every hosted rank; empty if it is the same on all."""
    return tuple(torch.Tensor.item(own) for own in each_ranks(t)) if differs(t) else ()


def view_of_block(block: np.ndarray | jax.Array, base: Layout, view: Layout) -> torch.Tensor:
    """What a view shows of a rank's block of a storage, whose layout is `base`."""
    host = transfer.from_numpy(np.array(block))
    return host if view is base else _view_of_host(host, base, view)


def _view_of_host(host: torch.Tensor, base: Layout, view: Layout) -> torch.Tensor:
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
