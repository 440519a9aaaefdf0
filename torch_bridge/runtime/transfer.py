"""Between CPU tensors and JAX arrays. Copies are real: neither side ever sees the other's later writes."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import torch
from jax.sharding import PartitionSpec

from torch_bridge import _compat, metrics, source
from torch_bridge.config import fork_guard
from torch_bridge.ir import dtypes
from torch_bridge.mesh import abstract_arrays, rank_numbers, sharding, spmd
from torch_bridge.precision import precision_mode
from torch_bridge.runtime import abstract, session
from torch_bridge.runtime.observers import around

WITNESS: Callable[[Any, Sequence[torch.Tensor]], None] | None = None
"""If there is one, it is told of every array that is made of CPU tensors, and of these (`host_constants`)."""


def to_array(t: torch.Tensor, device: Any = None, spec: PartitionSpec | None = None) -> jax.Array:
    """A CPU tensor's values as a new JAX array (same shape and dtype). spec: how ranks hold it, if they differ; these are each hosted rank's own values."""
    fork_guard.check()
    array = abstract.uploaded(t) if abstract_arrays.active() else _moved(t, device, spec)
    if WITNESS is not None:
        WITNESS(array, [t])
    return array


def _moved(t: torch.Tensor, device: Any, spec: PartitionSpec | None) -> jax.Array:
    started = time.perf_counter()
    own = to_host(t)
    if device is None and not sharding.active():
        array = _compat.put(own)
    else:
        with _compat.enable_x64():
            if spec is not None:
                array = sharding.filled(own, spec)
            else:
                array = sharding.replicated(own) if device is None else jax.device_put(own, device)
    metrics.TRANSFER_TO_DEVICE.add(time.perf_counter() - started)
    return array


def to_host(t: torch.Tensor) -> np.ndarray:
    """A CPU tensor's values as the device would hold them, in memory of their own."""
    host = precision_mode.uploaded(to_numpy(t)).copy()  # on CPU devices JAX takes numpy memory as it is, whatever `may_alias` says
    metrics.OUTBOUND_DATA.add(host.nbytes)
    return host


def to_numpy(t: torch.Tensor) -> np.ndarray:
    """A CPU tensor's values as an array that may share its memory; bfloat16 and float8 as JAX's types."""
    if getattr(type(t), "differs_by_rank", False):
        raise rank_numbers.PlainNumberNeeded(
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
    if _is_foreign(host.dtype):
        raw = torch.from_numpy(host.view(np.int16 if host.dtype.itemsize == 2 else np.uint8))
        return raw.view(dtypes.to_torch(host.dtype))
    return torch.from_numpy(host)


@functools.cache
def _is_foreign(dtype: np.dtype) -> bool:
    return dtype.name.startswith(("bfloat16", "float8"))


def to_cpu(array: jax.Array, size: tuple[int, ...] | None = None) -> torch.Tensor:
    """A JAX array's values as a new contiguous CPU tensor; waits until they are computed.

    size: the shape that a rank sees; of a value that differs among ranks, the first hosted rank's is taken.
    """
    from torch_bridge.runtime.executor import explained

    started = time.perf_counter()
    if size is None and spmd.divided(array):
        metrics.count("ReplicateShardedData")
    with explained(), around(session.current().observers, "wait"):
        host = np.array(spmd.whole(array) if size is None else sharding.first_block(array, size))
    metrics.TRANSFER_FROM_DEVICE.add(time.perf_counter() - started)
    metrics.INBOUND_DATA.add(host.nbytes)
    return from_numpy(host)


def attributes_of(owner: torch.nn.Module | None) -> Callable[[str], Any]:
    """For `interpret.run`: the arrays of tensors that a module holds, by their dotted names."""

    def attribute(target: str) -> Any:
        value: Any = owner
        for part in target.split("."):
            value = getattr(value, part)
        return to_array(value)

    return attribute
