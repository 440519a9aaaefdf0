"""The gated MLPs of a mixture of experts, and their gradients, as ops of the graph; `lowerings.grouped_mlp` says what they do.

Import this after `backend.ensure()` (which brings JAX up).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import torch

from torch_bridge import _compat
from torch_bridge.lowerings import grouped_mlp, lowering
from torch_bridge.runtime import transfer

_GIVEN = "Tensor rows, Tensor gate_up, Tensor down, Tensor ends"
_library = torch.library.Library("torch_bridge", "FRAGMENT")
_library.define(f"grouped_mlp({_GIVEN}, str act, int mean) -> (Tensor, Tensor)")
_library.define(f"grouped_mlp_backward(Tensor grad, {_GIVEN}, Tensor kept, str act, int mean) -> (Tensor, Tensor, Tensor)")
ops = torch.ops.torch_bridge


@lowering(ops.grouped_mlp.default, once=True, kernels=bool)
def _forward(rows: jax.Array, gate_up: jax.Array, down: jax.Array, ends: jax.Array, act: str, mean: int) -> tuple[jax.Array, jax.Array]:
    return grouped_mlp.grouped_mlp(act, mean, rows, gate_up, down, ends)


@lowering(ops.grouped_mlp_backward.default, once=True, kernels=bool)
def _backward(
    grad: jax.Array, rows: jax.Array, gate_up: jax.Array, down: jax.Array, ends: jax.Array, kept: jax.Array, act: str, mean: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    return grouped_mlp.gradients(act, mean, grad, rows, gate_up, down, ends, kept)


def _forward_meta(
    rows: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, ends: torch.Tensor, act: str, mean: int
) -> tuple[torch.Tensor, torch.Tensor]:
    return rows.new_empty(rows.shape), rows.new_empty(grouped_mlp.kept_rows(rows.shape[0], ends.shape[0], mean), gate_up.shape[2])


def _backward_meta(grad: torch.Tensor, *given: Any) -> tuple[torch.Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in given[:3])


def _on_cpu(fn: Callable[..., tuple[jax.Array, ...]]) -> Callable[..., tuple[torch.Tensor, ...]]:
    """For recorded graphs that run in eager torch: the lowering, on JAX's arrays."""

    def run(*given: Any) -> tuple[torch.Tensor, ...]:
        with _compat.enable_x64():
            found = fn(*(transfer.to_array(x.contiguous()) if isinstance(x, torch.Tensor) else x for x in given))
        return tuple(map(transfer.to_cpu, found))

    return run


_library.impl("grouped_mlp", _forward_meta, "Meta")
_library.impl("grouped_mlp", _on_cpu(_forward), "CPU")
_library.impl("grouped_mlp_backward", _backward_meta, "Meta")
_library.impl("grouped_mlp_backward", _on_cpu(_backward), "CPU")
