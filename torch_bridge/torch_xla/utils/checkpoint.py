"""`torch_xla.utils.checkpoint`: activation checkpointing that the compiler cannot undo."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.utils.checkpoint

from torch_bridge.mesh import random_state
from torch_bridge.torch_xla.core import xla_model

_torch_checkpoint = torch.utils.checkpoint.checkpoint
"""Kept because scripts replace `torch.utils.checkpoint.checkpoint` by the function below."""


class _Recomputed:
    """The checkpointed function. Its second run, for which `after` is set, waits for those gradients and sees the device's random state of the first."""

    def __init__(self, function: Callable[..., Any], preserve_rng_state: bool):
        self.function = function
        self.preserve_rng_state = preserve_rng_state
        self.after: tuple[torch.Tensor, ...] = ()

    def __call__(self, *args: Any) -> Any:
        if not self.after:
            self.rng_state = random_state.DEFAULT.get_state()
            return self.function(*args)
        from torch_bridge.recorder.barrier import barrier

        tensors = [a for a in args if isinstance(a, torch.Tensor) and a.device.type == "xla"]
        behind = dict(zip(map(id, tensors), barrier(tensors, self.after), strict=True))
        with xla_model.fork_rng(enabled=self.preserve_rng_state):
            if self.preserve_rng_state:
                random_state.DEFAULT.set_state(self.rng_state)
            return self.function(*(behind.get(id(a), a) for a in args))


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
    return CheckpointFunction.apply(_Recomputed(function, preserve), preserve, *args)
