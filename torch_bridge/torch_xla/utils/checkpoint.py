"""`torch_xla.utils.checkpoint`: activation checkpointing that the compiler cannot undo."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.utils.checkpoint

_torch_checkpoint = torch.utils.checkpoint.checkpoint
"""Kept because scripts replace `torch.utils.checkpoint.checkpoint` by the function below."""


class _Recomputed:
    """The checkpointed function; `after` is set for the second run, which must wait for those gradients."""

    def __init__(self, function: Callable[..., Any]):
        self.function = function
        self.after: tuple[torch.Tensor, ...] = ()

    def __call__(self, *args: Any) -> Any:
        if not self.after:
            return self.function(*args)
        from torch_bridge.barrier import barrier

        tensors = [a for a in args if isinstance(a, torch.Tensor) and a.device.type == "xla"]
        waiting = iter(barrier(tensors, self.after))
        return self.function(*(next(waiting) if any(a is t for t in tensors) else a for a in args))


class CheckpointFunction(torch.utils.checkpoint.CheckpointFunction):
    """`torch_xla.utils.checkpoint.CheckpointFunction`: torch's, with a barrier before the recomputation."""

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.run_function.after = tuple(g for g in grads if isinstance(g, torch.Tensor) and g.device.type == "xla")
        try:
            return torch.utils.checkpoint.CheckpointFunction.backward(ctx, *grads)
        finally:
            ctx.run_function.after = ()


def checkpoint(function: Callable[..., Any], *args: Any, use_reentrant: bool = True, **kwargs: Any) -> Any:
    """`torch_xla.utils.checkpoint.checkpoint`: call `function(*args)` without keeping its activations, and once more in the backward pass.

    The device's and the CPU's random states are those of the first call (`preserve_rng_state=False` turns that off). `use_reentrant=False`,
    which torch_xla refuses, is torch's own, with its keyword arguments.
    """
    if not use_reentrant:
        return _torch_checkpoint(function, *args, use_reentrant=False, **kwargs)
    preserve = kwargs.pop("preserve_rng_state", True)
    if kwargs:
        raise ValueError(
            f"Unexpected keyword arguments: {', '.join(kwargs)} (with use_reentrant=True the function takes positional arguments only)"
        )
    return CheckpointFunction.apply(_Recomputed(function), preserve, *args)
