"""Between CPU tensors and JAX arrays. Copies are real: neither side ever sees the other's later writes."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import torch
from torch.utils.weak import WeakIdKeyDictionary

from torch_bridge import _compat, abstract, dtypes, metrics, numerics, process, rank_tensor, ranks, sharding, source, world
from torch_bridge.layout import Layout, is_dense, layout
from torch_bridge.segment import Storage
from torch_bridge.tensor import XLATensor, make

WITNESS: Callable[[Any, Sequence[torch.Tensor]], None] | None = None
"""If there is one, it is told of every array that is made of CPU tensors, and of these (`uploads`)."""


def to_array(t: torch.Tensor, device: Any = None) -> jax.Array:
    """A CPU tensor's values as a new JAX array (same shape and dtype)."""
    process.check()
    array = abstract.uploaded(t) if abstract.active() else _moved(t, device)
    if WITNESS is not None:
        WITNESS(array, [t])
    return array


def _moved(t: torch.Tensor, device: Any) -> jax.Array:
    host = numerics.uploaded(to_numpy(t))
    started = time.perf_counter()
    own = host.copy()  # on CPU devices JAX takes numpy memory as it is, whatever `may_alias` says
    if device is None and not sharding.active():
        array = _compat.put(own)
    else:
        with _compat.enable_x64():
            array = sharding.replicated(own) if device is None else jax.device_put(own, device)
    metrics.TRANSFER_TO_DEVICE.add(time.perf_counter() - started)
    metrics.OUTBOUND_DATA.add(host.nbytes)
    return array


def to_numpy(t: torch.Tensor) -> np.ndarray:
    """A CPU tensor's values as an array that may share its memory; bfloat16 and float8 as JAX's types."""
    if type(t) is rank_tensor.RankTensor:
        raise ranks.PlainNumberNeeded(
            f"a CPU tensor of shape {list(t.shape)} that differs by rank is used together with xla tensors (at {source.user_line()}): move it to xla "
            "first (t.to('xla')), where each rank has its own"
        )
    _require_strided(t)
    if t.requires_grad:
        t = t.detach()
    if t.is_neg() or t.is_conj():
        t = t.resolve_conj().resolve_neg()
    if not t.is_contiguous():
        t = t.contiguous()
    foreign = _foreign(t.dtype)
    return t.numpy() if foreign is None else t.view(torch.int16 if foreign.itemsize == 2 else torch.uint8).numpy().view(foreign)


def bits(t: torch.Tensor) -> bytes:
    """The values of a CPU tensor, for comparison."""
    return to_numpy(t).tobytes()


@functools.cache
def _foreign(dtype: torch.dtype) -> np.dtype | None:
    """JAX's own dtype for numbers that numpy does not know by itself."""
    found = dtypes.to_jax(dtype)
    return found if found.kind == "V" or found.name.startswith(("bfloat16", "float8")) else None


def _require_strided(t: torch.Tensor) -> None:
    if t.layout != torch.strided:
        raise NotImplementedError(
            f"device xla has no sparse tensors, got {t.layout} of shape {list(t.shape)} (at {source.user_line()}): JAX compiles dense arrays only. "
            "Use .to_dense(); for nn.Embedding(sparse=True) use sparse=False and an optimizer for dense gradients instead of SparseAdam."
        )


def from_numpy(host: np.ndarray) -> torch.Tensor:
    """The same memory as a CPU tensor."""
    if host.dtype.name.startswith(("bfloat16", "float8")):
        raw = torch.from_numpy(host.view(np.int16 if host.dtype.itemsize == 2 else np.uint8))
        return raw.view(dtypes.to_torch(host.dtype))
    return torch.from_numpy(host)


def to_cpu(array: jax.Array, size: tuple[int, ...] | None = None) -> torch.Tensor:
    """A JAX array's values as a new contiguous CPU tensor; waits until they are computed.

    size: the shape that a rank sees; of a value that differs among ranks, the first hosted rank's is taken.
    """
    from torch_bridge.executor import explained

    started = time.perf_counter()
    with explained():
        host = np.array(array if size is None else sharding.first_block(array, size))
    metrics.TRANSFER_FROM_DEVICE.add(time.perf_counter() - started)
    metrics.INBOUND_DATA.add(host.nbytes)
    return from_numpy(host)


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
    _require_strided(t)
    own = kept(t)
    if own is not None:
        return own
    size = tuple(t.shape)
    if not is_dense(size, tuple(t.stride())):
        t = t.detach().clone()
    stride = tuple(t.stride())
    base = layout(size, stride if is_dense(size, stride) else None, 0, t.dtype)
    return make(base, Storage(base, to_array(t)))


def upload_blocks(blocks: list[torch.Tensor], spec: Any) -> XLATensor:
    """A new xla tensor from the hosted ranks' own CPU tensors, labelled as `spec` says."""
    base = layout(tuple(blocks[0].shape), None, 0, blocks[0].dtype)
    hosts: dict[int, Any] = {}
    if abstract.active():
        storage = Storage(base, abstract.blocks(base.size, dtypes.to_jax(base.dtype), spec))
        storage.describe(spec=spec)
        return make(base, storage)
    for t in blocks:
        if t.dtype != blocks[0].dtype or t.shape != blocks[0].shape:
            raise ValueError(
                f"every rank needs a tensor of the same shape and dtype, got {blocks[0].dtype}{list(blocks[0].shape)} and {t.dtype}{list(t.shape)}"
            )
        if id(t) not in hosts:
            hosts[id(t)] = numerics.uploaded(to_numpy(t)).copy()
    with _compat.enable_x64():
        array = sharding.from_blocks([hosts[id(t)] for t in blocks], spec)
    if WITNESS is not None:
        WITNESS(array, blocks)
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
    host = from_numpy(np.array(block))
    return host if view is base else _host_view(host, base, view)


def download(t: XLATensor) -> torch.Tensor:
    """The values of an xla tensor as a new CPU tensor, running what is pending first if need be; the first hosted rank's where they differ."""
    from torch_bridge import executor

    storage, view = t._storage, t._layout
    executor.materialize(storage)
    base = storage.layout
    array = storage.array
    if array is None:
        host = from_numpy(numerics.uploaded(to_numpy(torch.full(base.size, storage.fill, dtype=base.dtype))))
    else:
        host = to_cpu(array, base.size if sharding.active() else None)
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
