"""Between CPU tensors and JAX arrays. Copies are real: neither side ever sees the other's later writes."""

from __future__ import annotations

import time
from typing import Any

import jax
import numpy as np
import torch

from torch_bridge import _compat, dtypes, metrics, process
from torch_bridge.layout import layout
from torch_bridge.segment import Storage
from torch_bridge.tensor import XLATensor, make


def to_array(t: torch.Tensor, device: Any = None) -> jax.Array:
    """A CPU tensor's values as a new JAX array (same shape and dtype)."""
    process.check()
    dtype = dtypes.to_jax(t.dtype)
    t = t.detach().resolve_conj().resolve_neg()
    if not t.is_contiguous():
        t = t.contiguous()
    if dtype.kind == "V" or dtype.name.startswith(("bfloat16", "float8")):
        host = t.view(torch.int16 if dtype.itemsize == 2 else torch.uint8).numpy().view(dtype)
    else:
        host = t.numpy()
    started = time.perf_counter()
    with _compat.enable_x64():
        # A copy of our own: on CPU devices JAX takes numpy memory as it is, whatever `may_alias` says.
        array = jax.device_put(host.copy(), device)
    metrics.TRANSFER_TO_DEVICE.add(time.perf_counter() - started)
    metrics.OUTBOUND_DATA.add(host.nbytes)
    return array


def to_cpu(array: jax.Array) -> torch.Tensor:
    """A JAX array's values as a new contiguous CPU tensor; waits until they are computed."""
    from torch_bridge.executor import explained

    started = time.perf_counter()
    with explained():
        host = np.array(array)
    metrics.TRANSFER_FROM_DEVICE.add(time.perf_counter() - started)
    metrics.INBOUND_DATA.add(host.nbytes)
    dtype = dtypes.to_torch(host.dtype)
    if host.dtype.name.startswith(("bfloat16", "float8")):
        raw = torch.from_numpy(host.view(np.int16 if host.dtype.itemsize == 2 else np.uint8))
        return raw.view(dtype)
    return torch.from_numpy(host)


def upload(t: torch.Tensor) -> XLATensor:
    """A new xla tensor with the CPU tensor's values and strides."""
    from torch_bridge.layout import is_dense

    size, stride = tuple(t.shape), tuple(t.stride())
    base = layout(size, stride if is_dense(size, stride) else None, 0, t.dtype)
    return make(base, Storage(base, to_array(t)))


def download(t: XLATensor) -> torch.Tensor:
    """The values of an xla tensor as a new CPU tensor, running what is pending first if need be."""
    from torch_bridge import executor

    storage, view = t._storage, t._layout
    executor.materialize(storage)
    base = storage.layout
    if storage.array is None:
        host = torch.full(base.size, storage.fill, dtype=base.dtype)
    else:
        host = to_cpu(storage.array)
    if view is base:
        if not host.is_contiguous() or host.stride() != view.stride:
            host = torch.empty_strided(view.size, view.stride, dtype=view.dtype).copy_(host)
        return host
    return _host_view(host, base, view)


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
