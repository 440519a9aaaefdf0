"""`torch_xla.core.xla_builder`, known as `xb`: JAX functions on xla tensors.

Building XLA computations by hand is not provided; each name says what to do instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch_bridge.runtime import backend

__all__ = ["call_jax"]


def call_jax(jax_func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None, name: str | None = None) -> Any:
    """`xb.call_jax`: `jax_func(*args, **kwargs)`, part of the recorded step. The xla tensors in (nests of) arguments are JAX arrays for it, and arrays in its
    result are xla tensors; other arguments are constants. It must be pure: it is traced once for each combination of shapes, dtypes and constants.

    No gradients pass (`torch_xla.experimental.assume_pure.j2t_autograd`). `name` is accepted. Raises ValueError for tensors on the CPU.
    """
    backend.ensure()
    from torch_bridge.recorder import jax_calls

    return jax_calls.call(jax_func, args, kwargs)


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    raise NotImplementedError(
        f"torch_xla.core.xla_builder.{name}: building XLA computations by hand is not supported. Write the computation in JAX, and call it with "
        "torch_xla.core.xla_builder.call_jax(function, tensors)."
    )
