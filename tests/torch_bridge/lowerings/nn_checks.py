"""Checks beside `parity.check` for the neural-network families: gradients of forward lowerings, and Scalars that are traced."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import torch
from torch.utils._pytree import tree_leaves

import torch_bridge.lowerings as lowerings
from tests.torch_bridge.lowerings.batches import verify
from tests.torch_bridge.lowerings.parity import to_jax, to_torch
from torch_bridge import _compat
from torch_bridge.ir import dtypes


def run(op: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> list[Any]:
    """The tensor results of a lowering under jit, as torch tensors; for ops that have no CPU kernel to compare with. None stays None."""
    low = lowerings.lookup(op)
    assert low is not None, f"{op} has no lowering"
    with _compat.enable_x64():
        where = [i for i, a in enumerate(args) if isinstance(a, torch.Tensor)]

        def call(values: list[Any]) -> Any:
            filled = [to_jax(a) for a in args]
            for i, value in zip(where, values, strict=True):
                filled[i] = value
            return low.fn(*filled, **kwargs)

        out = jax.jit(call)([to_jax(args[i]) for i in where])
        out = out if isinstance(out, tuple) else (out,)
        return [to_torch(o) if hasattr(o, "dtype") else o for o in out]


def check_gradients(
    op: torch._ops.OpOverload,
    *args: Any,
    constants: tuple[int, ...] = (),
    rtol: float | None = None,
    atol: float | None = None,
    **kwargs: Any,
) -> None:
    """Assert that `jax.grad` through the lowering's first result agrees with torch autograd.

    For every floating tensor among `args` but the `constants`, which torch has no gradient of.
    """
    where = [i for i, a in enumerate(args) if isinstance(a, torch.Tensor) and a.is_floating_point() and i not in constants]
    inputs = [args[i].detach().clone().requires_grad_() for i in where]
    out = tree_leaves(op(*[inputs[where.index(i)] if i in where else a for i, a in enumerate(args)], **kwargs))[0]
    weights = torch.linspace(0.5, 1.5, out.numel(), dtype=out.dtype).reshape(out.shape)
    expected = torch.autograd.grad((out * weights).sum(), inputs)
    fn = lowerings.lookup(op).fn

    def loss(values: list[Any]) -> Any:
        filled = [values[where.index(i)] if i in where else to_jax(a) for i, a in enumerate(args)]
        return (jax.tree.leaves(fn(*filled, **kwargs))[0] * to_jax(weights)).sum()

    def compare(got: list[Any]) -> None:
        for g, e in zip(got, expected, strict=True):
            torch.testing.assert_close(to_torch(g), e, rtol=rtol, atol=atol, equal_nan=True)

    with _compat.enable_x64():
        values = [to_jax(t) for t in inputs]
    verify((check_gradients, constants, op, args, kwargs), jax.jit(jax.grad(loss)), values, compare)


def check_scalars(op: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> None:
    """Assert parity with eager torch when every number for a Scalar of the schema is an input of the compiled program."""
    expected = op(*args, **kwargs)
    scalars = {a.name: i for i, a in enumerate(op._schema.arguments) if str(a.type) in ("number", "Scalar")}
    low = lowerings.lookup(op)
    assert low.lift
    with _compat.enable_x64():
        fixed = [to_jax(a) for a in args]
        numbers = {i: a for i, a in enumerate(args) if i in scalars.values()} | {k: v for k, v in kwargs.items() if k in scalars}
        assert numbers, f"{op} was given no Scalar"
        inputs = {k: jnp.asarray(v, jnp.float64 if isinstance(v, float) else jnp.int64) for k, v in numbers.items()}

    def call(values: dict[Any, Any]) -> Any:
        lifted = {k: dtypes.Scalar(type(numbers[k]), v) for k, v in values.items()}
        positional = [lifted.get(i, a) for i, a in enumerate(fixed)]
        return low.fn(*positional, **{k: lifted.get(k, v) for k, v in kwargs.items()})

    def compare(got: Any) -> None:
        torch.testing.assert_close(to_torch(got), expected, equal_nan=True)

    verify((check_scalars, op, args, kwargs), jax.jit(call), inputs, compare)
