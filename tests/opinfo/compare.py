"""Moving samples to device xla, and comparing what comes back with eager torch."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from torch_bridge import metrics


def copied(tree: Any, device: str) -> Any:
    """The tree with its tensors copied to `device` as leaves of autograd, once each, and its device arguments changed to it."""
    made: dict[int, torch.Tensor] = {}

    def move(x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            if id(x) not in made:
                copy = x.detach().clone()
                copy = copy.to(device) if x.device.type == "cpu" else copy
                if isinstance(x, torch.nn.Parameter):
                    copy = torch.nn.Parameter(copy, requires_grad=x.requires_grad)
                made[id(x)] = copy.requires_grad_(x.requires_grad)
            return made[id(x)]
        if isinstance(x, torch.device) or (isinstance(x, str) and x == "cpu"):
            return torch.device(device)
        return x

    return tree_map(move, tree)


def leaves(tree: Any) -> list[Any]:
    """The leaves of a result; torch's named tuples count as tuples."""
    return tree_leaves(tree)


def to_cpu(tree: Any) -> Any:
    """A result with its tensors detached and on the CPU."""
    return tree_map(lambda x: x.detach().cpu() if isinstance(x, torch.Tensor) else x, tree)


def gradients(out: Any, inputs: Any) -> list[Any] | None:
    """The gradients of a weighted sum of the results for every input that requires one; None if nothing is differentiable.

    The weights depend only on the shapes, so both devices use the same.
    """
    results = [x for x in leaves(out) if isinstance(x, torch.Tensor) and x.requires_grad]
    wanted = [x for x in leaves(inputs) if isinstance(x, torch.Tensor) and x.requires_grad]
    if not results or not wanted:
        return None
    found = torch.autograd.grad(results, wanted, [_weights(r) for r in results], allow_unused=True)
    return list(found)


def _weights(x: torch.Tensor) -> torch.Tensor:
    """Random numbers that every floating dtype holds exactly."""
    generator = torch.Generator().manual_seed(x.numel())
    dtype = torch.complex64 if x.is_complex() else torch.float32
    numbers = torch.randn(x.shape, dtype=dtype, generator=generator)
    return (numbers if x.is_complex() else numbers.bfloat16()).to(x.dtype).to(x.device)


def difference(got: Any, expected: Any, rtol: float, atol: float, values: bool = True) -> str:
    """How a result (on the CPU) differs from the expected one in structure, dtype, shape or value; empty if it does not."""
    got_leaves, expected_leaves = leaves(got), leaves(expected)
    if len(got_leaves) != len(expected_leaves):
        return f"{len(got_leaves)} results instead of {len(expected_leaves)}"
    for i, (g, e) in enumerate(zip(got_leaves, expected_leaves, strict=True)):
        found = _leaf_difference(g, e, rtol, atol, values)
        if found:
            return f"result {i}: {found}"
    return ""


def _leaf_difference(g: Any, e: Any, rtol: float, atol: float, values: bool) -> str:
    if not isinstance(e, torch.Tensor) or not isinstance(g, torch.Tensor):
        if type(g) is not type(e):
            return f"{type(g).__name__} instead of {type(e).__name__}"
        if isinstance(e, float):
            g, e = torch.tensor(g), torch.tensor(e)
        else:
            return "" if not values or g == e or isinstance(e, torch.device) else f"{g!r} instead of {e!r}"
    if g.dtype != e.dtype:
        return f"dtype {g.dtype} instead of {e.dtype}"
    if g.shape != e.shape:
        return f"shape {tuple(g.shape)} instead of {tuple(e.shape)}"
    if not values:
        return ""
    return _value_difference(g, e, rtol, atol)


def _value_difference(g: torch.Tensor, e: torch.Tensor, rtol: float, atol: float) -> str:
    if g.layout != e.layout:
        return f"layout {g.layout} instead of {e.layout}"
    inexact = e.is_floating_point() or e.is_complex()
    try:
        torch.testing.assert_close(g, e, rtol=rtol if inexact else 0, atol=atol if inexact else 0, equal_nan=True)
    except AssertionError as error:
        return " ".join(str(error).split())
    return ""


def stride_difference(got: Any, expected: Any) -> str:
    """Where the strides of a result's tensors differ from the expected ones; strides of dims of size 1 and of empty tensors say nothing."""
    for i, (g, e) in enumerate(zip(leaves(got), leaves(expected), strict=True)):
        if isinstance(e, torch.Tensor) and e.layout == torch.strided and _steps(g) != _steps(e):
            return f"result {i}: strides {g.stride()} instead of {e.stride()} for shape {tuple(e.shape)}"
    return ""


def _steps(x: torch.Tensor) -> list[int]:
    return [step for size, step in zip(x.shape, x.stride(), strict=True) if size > 1] if x.numel() else []


class Counted:
    """What ran on the host in between: `fallbacks` lacks a lowering, `on_host` needs values."""

    def __enter__(self) -> Counted:
        self._before = dict(metrics.COUNTERS)
        return self

    def __exit__(self, *exc: object) -> None:
        grown = sorted(k for k, n in metrics.COUNTERS.items() if n > self._before.get(k, 0))
        self.fallbacks = [k for k in grown if k.startswith("aten::")]
        self.on_host = [k for k in grown if k.startswith("host::")]


def attempt(fn: Callable[[], Any]) -> tuple[Any, Exception | None]:
    """The result of a call, or its exception."""
    try:
        return fn(), None
    except Exception as error:
        return None, error


def forget_pending() -> None:
    """Drop what a failed call left recorded."""
    from torch_bridge.runtime import executor

    with suppress(Exception):
        executor.sync()


def forget_caches() -> None:
    """Free the compiled programs."""
    import jax

    from torch_bridge.runtime import executor

    executor.clear_cache()
    jax.clear_caches()
