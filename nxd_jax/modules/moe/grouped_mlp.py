"""The usual gated MLPs of dropless experts as one op: what lies between the two products is never sorted, and never put together from parts."""

from __future__ import annotations

from typing import Any

import torch

from nxd_jax.modules.moe.grouped_product import check_product, grouped_product
from nxd_jax.modules.moe.model_utils import ACT2FN
from torch_bridge.runtime import backend

ACTIVATIONS = ("gelu", "relu", "sigmoid", "silu", "tanh")
"""Keys of `ACT2FN` that the op knows."""


def grouped_mlp(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, ends: torch.Tensor, act: str, mean: int) -> torch.Tensor:
    """Row r of x through the MLP `(act(x @ gate) * (x @ up)) @ down` of its expert -> [m, h], in x's dtype; x on xla.

    x: [m, h], sorted by expert. gate_up: [e, h, 2 i], gate first, and down: [e, i, h], in x's dtype. ends: [e] integers, where each expert's rows end. Rows
    behind the last end belong to nobody: they give zeros, and get a gradient of zero. act: one of ACTIVATIONS. mean: about how many rows an expert has; it
    changes the speed and no values.

    Raises ValueError for shapes that do not fit together.
    """
    check_product(x, gate_up, ends, None)
    check_product(x.new_empty((x.shape[0], gate_up.shape[2] // 2), device="meta"), down, ends, None)
    out: torch.Tensor = _GroupedMLP.apply(x.contiguous(), gate_up.contiguous(), down.contiguous(), ends.to(torch.int32), act, mean)
    return out


def _ops() -> Any:
    backend.ensure()
    from torch_bridge.recorder.grouped_mlp_ops import ops

    return ops


class _GroupedMLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, ends: torch.Tensor, act: str, mean: int) -> Any:
        out, kept = _ops().grouped_mlp(x, gate_up, down, ends, act, mean)
        ctx.act, ctx.mean = act, mean
        ctx.save_for_backward(x, gate_up, down, ends, kept)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        *given, ends, kept = ctx.saved_tensors
        needed = ctx.needs_input_grad[:3]
        if torch.is_grad_enabled():  # create_graph=True
            return *_with_graph(ctx.act, given, ends, needed, grad), None, None, None
        found = _ops().grouped_mlp_backward(grad.contiguous(), *given, ends, kept, ctx.act, ctx.mean)
        return *(g if is_needed else None for g, is_needed in zip(found, needed, strict=True)), None, None, None


def _with_graph(act: str, given: list[torch.Tensor], ends: torch.Tensor, needed: Any, grad: torch.Tensor) -> list[torch.Tensor | None]:
    """Gradients that have gradients themselves: those of the same product by product."""
    x, gate_up, down = given
    gate, up = grouped_product(x, gate_up, ends).chunk(2, dim=-1)
    out = grouped_product(ACT2FN[act](gate) * up, down, ends)
    wanted = [t for t, is_needed in zip(given, needed, strict=True) if is_needed]
    found = iter(torch.autograd.grad(out, wanted, grad, create_graph=True))
    return [next(found) if is_needed else None for is_needed in needed]
