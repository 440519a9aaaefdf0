"""`check_gradient`: jax.grad through a lowering against torch autograd, for the ops that `to_jax` differentiates."""

from __future__ import annotations

from typing import Any

import jax
import torch
from torch.utils._pytree import tree_leaves

import torch_bridge.lowerings as lowerings
from tests.torch_bridge.lowerings.batches import verify
from tests.torch_bridge.lowerings.parity import to_jax, to_torch
from torch_bridge import _compat


def check_gradient(
    op: torch._ops.OpOverload, *args: Any, result: int = 0, rtol: float | None = None, atol: float | None = None, **kwargs: Any
) -> None:
    """Assert that JAX and torch agree on the gradient of every floating-point tensor in `args` (all at top level).

    The loss is the result's dot product with fixed uneven weights, so that ties and signs show.
    """
    where = [i for i, a in enumerate(args) if isinstance(a, torch.Tensor) and a.is_floating_point()]
    tensors = [args[i].detach().clone().requires_grad_() for i in where]

    def fill(values: list[Any], rest: tuple[Any, ...]) -> list[Any]:
        filled = list(rest)
        for i, value in zip(where, values, strict=True):
            filled[i] = value
        return filled

    out = tree_leaves(op(*fill(tensors, args), **kwargs))[result]
    weights = torch.linspace(0.5, 1.5, out.numel(), dtype=out.dtype).reshape(out.shape)
    expected = torch.autograd.grad((out * weights).sum(), tensors, allow_unused=True)
    low = lowerings.lookup(op)
    assert low is not None, f"{op} has no lowering"

    def loss(values: list[Any]) -> Any:
        rest = tuple(to_jax(a) for a in args)
        y = jax.tree.leaves(low.fn(*fill(values, rest), **kwargs))[result]
        return (y * to_jax(weights)).sum()

    def compare(got: list[Any]) -> None:
        for g, e, t in zip(got, expected, tensors, strict=True):
            torch.testing.assert_close(to_torch(g), torch.zeros_like(t) if e is None else e, rtol=rtol, atol=atol, equal_nan=True)

    with _compat.enable_x64():
        inputs = [to_jax(t) for t in tensors]
    verify((check_gradient, result, op, args, kwargs), jax.jit(jax.grad(loss)), inputs, compare)
