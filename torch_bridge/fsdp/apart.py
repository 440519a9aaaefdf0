"""A barrier between what the forward and the backward pass gather: `recorder.barrier`, by another name.

XLA's CPU compiler drops barriers before it looks for equal computations for the last time, and would keep what the forward pass gathered. Programs with this
op are compiled without that (`compiler.xla_options`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import torch

from torch_bridge.lowerings import lowering
from torch_bridge.runtime import backend

backend.ensure()

_library = torch.library.Library("torch_bridge", "FRAGMENT")
_library.define("apart(Tensor[] tensors) -> Tensor[]")
_library.impl("apart", lambda tensors: [torch.empty_like(t, memory_format=torch.contiguous_format) for t in tensors], "Meta")
_library.impl("apart", lambda tensors: [t.clone() for t in tensors], "CPU")
_OP = torch.ops.torch_bridge.apart.default


@lowering(_OP, entrywise=False)
def _apart(tensors: Sequence[jax.Array]) -> Any:
    return jax.lax.optimization_barrier(list(tensors))


def apart(tensors: Sequence[torch.Tensor], after: Sequence[torch.Tensor] = ()) -> list[torch.Tensor]:
    """The same values as new tensors, which the compiler computes with only once all of `tensors` and `after` exist. Without gradients."""
    return list(_OP([*tensors, *after])[: len(tensors)])
