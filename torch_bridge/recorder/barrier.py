"""A barrier in the compiled graph: XLA neither merges nor moves computations across it.

Activation checkpointing needs one: without it XLA finds that the recomputed forward equals the first one, keeps that, and saves nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import torch

from torch_bridge.ir.segment import LOCK
from torch_bridge.lowerings import lowering
from torch_bridge.recorder import dispatch
from torch_bridge.recorder.tensor import XLATensor, read
from torch_bridge.runtime import backend

backend.ensure()

_library = torch.library.Library("torch_bridge", "FRAGMENT")
_library.define("barrier(Tensor[] tensors) -> Tensor[]")


def _fresh(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [torch.empty_like(t, memory_format=torch.contiguous_format) for t in tensors]


_library.impl("barrier", _fresh, "Meta")
_library.impl("barrier", lambda tensors: [t.clone() for t in tensors], "CPU")
_OP = torch.ops.torch_bridge.barrier.default


@lowering(_OP, entrywise=False)
def _barrier(tensors: Sequence[jax.Array]) -> Any:
    return jax.lax.optimization_barrier(list(tensors))


class _Barrier(torch.autograd.Function):
    """The first `n` tensors, available only after the others too; gradients pass."""

    @staticmethod
    def forward(ctx: Any, n: int, *tensors: torch.Tensor) -> Any:
        return tuple(torch.ops.torch_bridge.barrier(list(tensors))[:n])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        return (None, *grads, *[None] * (len(ctx.needs_input_grad) - 1 - len(grads)))


def barrier(tensors: Sequence[torch.Tensor], after: Sequence[torch.Tensor] = ()) -> list[torch.Tensor]:
    """The same values as new tensors, which the compiler computes with only once all of `tensors` and `after` exist."""
    return list(_Barrier.apply(len(tensors), *tensors, *(t.detach() for t in after))) if tensors else []


def barrier_(tensors: Sequence[torch.Tensor]) -> None:
    """Put a barrier between what has been done with xla tensors so far and what follows (`xm.optimization_barrier_`)."""
    found = [t for t in tensors if isinstance(t, XLATensor)]
    if not found:
        return
    with LOCK, torch.no_grad():
        for t, behind in zip(found, torch.ops.torch_bridge.barrier(found), strict=True):
            dispatch.STATE.session.current.write_view(t._storage, t._layout, read(behind))
