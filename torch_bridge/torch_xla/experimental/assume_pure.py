"""`torch_xla.experimental.assume_pure`: functions that a script promises to be pure, and JAX functions with gradients."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from torch_bridge.runtime import backend

__all__ = ["assume_pure", "assume_pure_torch", "j2t_autograd"]


def assume_pure(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`assume_pure.assume_pure`: the function, which records what it does in every call; gradients pass. What the promise is for, less Python in each step,
    modules have here without it: they are played from recordings (`torch_bridge.optimize`).
    """

    @functools.wraps(fn)
    def pure(*args: Any, **kwargs: Any) -> Any:
        return fn(*args, **kwargs)

    return pure


def assume_pure_torch(func: Callable[..., Any] | None = None, use_cache: bool = False) -> Any:
    """`assume_pure.assume_pure_torch`, a decorator with or without arguments: the function without gradients. `use_cache` is accepted."""
    return assume_pure_torch if func is None else torch.no_grad()(assume_pure(func))


def j2t_autograd(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`assume_pure.j2t_autograd`: a JAX function as a function of xla tensors, whose gradients are those of `jax.vjp`.

    See `torch_xla.core.xla_builder.call_jax` for its arguments and results.
    """

    @functools.wraps(fn)
    def called(*args: Any, **kwargs: Any) -> Any:
        backend.ensure()
        from torch_bridge.recorder import jax_calls

        return jax_calls.differentiable(fn)(*args, **kwargs)

    return called
