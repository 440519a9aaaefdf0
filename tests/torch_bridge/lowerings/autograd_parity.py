"""`check_grad`: JAX's vjp of a lowering against torch's autograd of the op, tensors inside lists included."""

from __future__ import annotations

from typing import Any

import jax
import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

import torch_bridge.lowerings as lowerings
from tests.torch_bridge.lowerings.batches import verify
from tests.torch_bridge.lowerings.parity import to_jax, to_torch
from torch_bridge import _compat


def _is_real(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.is_floating_point()


def check_grad(op: torch._ops.OpOverload, *args: Any, rtol: float | None = None, atol: float | None = None, **kwargs: Any) -> None:
    """Assert equal gradients for every floating tensor argument, under the same random gradients of the results."""
    flat, spec = tree_flatten((list(args), kwargs))
    leaves = [i for i, x in enumerate(flat) if _is_real(x)]
    wanted = [x.detach().clone().requires_grad_() if _is_real(x) else x for x in flat]
    torch_args, torch_kwargs = tree_unflatten(wanted, spec)
    outs = [o for o in tree_leaves(op(*torch_args, **torch_kwargs)) if _is_real(o)]
    cotangents = [torch.randn(o.shape, generator=torch.Generator().manual_seed(i)).to(o.dtype) for i, o in enumerate(outs)]
    expected = torch.autograd.grad(outs, [wanted[i] for i in leaves], cotangents, allow_unused=True)
    with _compat.enable_x64():
        arrays = [to_jax(x) for x in flat]
        inputs = [arrays[i] for i in leaves], [to_jax(c) for c in cotangents]

    def call(values: list[Any]) -> list[Any]:
        filled = list(arrays)
        for i, v in zip(leaves, values, strict=True):
            filled[i] = v
        call_args, call_kwargs = tree_unflatten(filled, spec)
        results = jax.tree.leaves(lowerings.lookup(op).fn(*call_args, **call_kwargs))
        return [r for r in results if jax.numpy.issubdtype(r.dtype, jax.numpy.floating)]

    def pulled(given: tuple[list[Any], list[Any]]) -> list[Any]:
        _, pull = jax.vjp(jax.jit(call), given[0])
        return pull(given[1])[0]

    def compare(got: list[Any]) -> None:
        for g, e, i in zip(got, expected, leaves, strict=True):
            e = torch.zeros_like(flat[i]) if e is None else e
            torch.testing.assert_close(to_torch(g), e, rtol=rtol, atol=atol)

    verify((check_grad, op, args, kwargs), pulled, inputs, compare)
