"""Sharding annotations of xla tensors (`mesh.spmd`): what XLA is told about how a tensor is divided over the devices. Values do not change."""

from __future__ import annotations

from typing import Any

import jax
import torch
from jax.sharding import NamedSharding

from torch_bridge.ir.segment import LOCK
from torch_bridge.lowerings import lowering
from torch_bridge.mesh import spmd
from torch_bridge.recorder import dispatch, manual_regions
from torch_bridge.recorder.tensor import XLATensor, read
from torch_bridge.runtime import backend, executor

backend.ensure()

_library = torch.library.Library("torch_bridge", "FRAGMENT")
_library.define("shard(Tensor x, str sharding) -> Tensor")
_library.impl("shard", lambda x, sharding: torch.empty_like(x, memory_format=torch.contiguous_format), "Meta")
_library.impl("shard", lambda x, sharding: x.clone(), "CPU")
_OP = torch.ops.torch_bridge.shard.default


@lowering(_OP)
def _shard(x: jax.Array, sharding: str) -> jax.Array:
    return jax.lax.with_sharding_constraint(x, spmd.in_order(spmd.parse(sharding)))


def annotate(t: XLATensor, sharding: NamedSharding) -> None:
    """Divide a tensor so. A value that exists is moved now; one that waits is constrained where it is computed. What updates it later lies so, too.

    A view annotates what is read through it from now on, not its storage.
    """
    if manual_regions.inside(t):
        raise RuntimeError(
            "an annotation of a tensor in a region of manual sharding: there it is one device's block, which is not divided any further. Annotate what "
            "xs.disable_manual_sharding gives"
        )
    storage, every = t._storage, whole(t)
    with LOCK, torch.no_grad():
        if every and storage.segment is None:
            if storage.held is None:
                storage.describe(start=sharding)
            else:
                storage.held = spmd.put(storage.held, sharding)
        else:
            segment = dispatch.STATE.session.current
            segment.write_view(storage, t._layout, read(torch.ops.torch_bridge.shard(t, spmd.text(sharding))))
        if every:
            storage.describe(spec=sharding)


def clear(t: XLATensor) -> None:
    """Take an annotation back: the value is replicated."""
    storage = t._storage
    if storage.spec is None:
        return
    executor.materialize(storage)
    storage.describe(spec=None, start=None)
    if storage.held is not None:
        storage.held = spmd.place_whole(storage.held)


def whole(t: torch.Tensor) -> bool:
    """Whether an xla tensor is its storage as it lies, not a view with other dims."""
    return isinstance(t, XLATensor) and t._layout is t._storage.layout


def annotation(t: torch.Tensor) -> NamedSharding | None:
    """The annotation of an xla tensor; None without one, and for a view, whose dims are others than the annotation's."""
    spec = t._storage.spec if isinstance(t, XLATensor) and whole(t) else None
    return spec if isinstance(spec, NamedSharding) else None


class _WithGradients(torch.autograd.Function):
    """The same tensor, divided so; and its gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, sharding: NamedSharding) -> torch.Tensor:
        ctx.sharding = sharding
        out = torch.ops.torch_bridge.shard(x, spmd.text(sharding))
        out._storage.describe(spec=sharding)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return torch.ops.torch_bridge.shard(grads[0], spmd.text(ctx.sharding)), None


def with_gradients(x: torch.Tensor, sharding: NamedSharding) -> torch.Tensor:
    """A tensor with the same values, divided so, whose gradient is divided in the same way."""
    return _WithGradients.apply(x, sharding)
