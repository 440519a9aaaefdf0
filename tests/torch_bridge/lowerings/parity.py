"""`check`: one lowering against eager torch, without the device or the recorder in between."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import torch
from torch.utils._pytree import tree_leaves, tree_map

import torch_bridge.lowerings as lowerings
from tests.torch_bridge.lowerings.batches import rehearsing, verify
from torch_bridge import _compat
from torch_bridge.ir import dtypes

DROPPED = ("device", "layout", "pin_memory", "memory_format", "non_blocking", "generator")


def to_jax(x: Any) -> Any:
    """A CPU tensor as a JAX array; anything else unchanged."""
    if not isinstance(x, torch.Tensor):
        return x
    x = x.detach().contiguous().resolve_conj().resolve_neg()
    if x.dtype == torch.bfloat16:
        return jax.numpy.asarray(x.view(torch.int16).numpy().view(dtypes.to_jax(torch.bfloat16)))
    return jax.numpy.asarray(np.array(x.numpy()))


def to_torch(x: Any) -> torch.Tensor:
    array = np.array(x)
    if x.dtype == dtypes.to_jax(torch.bfloat16):
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def check(
    op: torch._ops.OpOverload, *args: Any, rtol: float | None = None, atol: float | None = None, jit: bool = True, **kwargs: Any
) -> None:
    """Assert that the lowering of `op` gives eager torch's values, dtypes and shapes on these CPU arguments.

    The lowering runs as it does in a program, under `jax.jit` with the tensors traced; eagerly, with their values at hand, where `jit` is False.
    """
    if not jit and rehearsing():
        return
    low = lowerings.lookup(op)
    assert low is not None, f"{op} has no lowering"
    kept = {k: v for k, v in kwargs.items() if k not in DROPPED}
    with _compat.enable_x64():
        leaves: list[Any] = []

        def abstract(x: Any) -> Any:
            if isinstance(x, torch.Tensor):
                leaves.append(to_jax(x))
                return ("leaf", len(leaves) - 1)
            return x

        template = tree_map(abstract, (list(args), kept))

    def call(values: list[Any]) -> list[Any]:
        def fill(x: Any) -> Any:
            if isinstance(x, tuple) and len(x) == 2 and x[0] == "leaf":
                return values[x[1]]
            if isinstance(x, (list, tuple)):
                return [fill(y) for y in x]
            return x

        filled = [fill(a) for a in template[0]]
        out = low.fn(*filled, **{k: fill(v) for k, v in template[1].items()})
        return [o for o in jax.tree.leaves(out) if hasattr(o, "dtype")]

    def compare(got: list[Any]) -> None:
        expected = [t for t in tree_leaves(op(*args, **kwargs)) if isinstance(t, torch.Tensor)]
        assert len(got) == len(expected), f"{op}: {len(got)} results, torch gives {len(expected)}"
        for g, e in zip(got, expected, strict=True):
            t = to_torch(g)
            assert t.dtype == e.dtype, f"{op}: dtype {t.dtype}, torch gives {e.dtype}"
            assert t.shape == e.shape, f"{op}: shape {tuple(t.shape)}, torch gives {tuple(e.shape)}"
            torch.testing.assert_close(t, e.resolve_conj().contiguous(), rtol=rtol, atol=atol, equal_nan=True)

    verify((check, jit, op, args, kept), jax.jit(call) if jit else call, leaves, compare)
