"""The kernels by name, how a program that is traced calls one, and whether it does."""

from __future__ import annotations

import ast
import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import torch

from torch_bridge.lowerings.torch_kernels import ffi

TARGET = "torch_bridge_kernel"
"""What XLA calls all kernels by; their own name is an attribute of the call."""
FLOATS = ("float32", "float64")
"""The dtypes that kernels compute in. bfloat16 and float16 stay XLA's: torch rounds between the steps of a kernel, where XLA keeps float32."""

Kernel = Callable[..., None]
_KERNELS: dict[str, Kernel] = {}
_USING = jax.make_user_context(False)
"""Part of the keys of what JAX keeps of traced functions."""


def kernel(name: str) -> Callable[[Kernel], Kernel]:
    """Register `fn(arguments, results, **options)` under a name. arguments, results: lists of CPU tensors, contiguous; arguments are read only."""

    def register(fn: Kernel) -> Kernel:
        if name in _KERNELS:
            raise ValueError(f"there is a kernel {name!r} already ({_KERNELS[name].__module__})")
        _KERNELS[name] = fn
        return fn

    return register


def using(allowed: bool) -> contextlib.AbstractContextManager[Any]:
    """A context: whether what this thread traces may call kernels."""
    found: contextlib.AbstractContextManager[Any] = _USING(allowed and available())
    return found


def wanted(*arrays: Any) -> bool:
    """Whether the program that is traced may call kernels for these operands: all that are floating have one dtype of `FLOATS`."""
    if not _USING.value:
        return False
    floating = {str(a.dtype) for a in arrays if jax.numpy.issubdtype(a.dtype, jax.numpy.inexact)}
    return len(floating) == 1 and floating <= set(FLOATS)


def call(name: str, results: Sequence[jax.ShapeDtypeStruct | jax.Array], *arrays: Any, **options: Any) -> tuple[Any, ...]:
    """The results of a kernel, inside of what is traced. results: their shapes and dtypes. options: numbers, strings and tuples of them."""
    assert name in _KERNELS, name
    made = jax.ffi.ffi_call(TARGET, [jax.ShapeDtypeStruct(r.shape, r.dtype) for r in results], vmap_method="sequential")(
        *arrays, kernel=name, options=repr(options)
    )
    return tuple(made)


@functools.cache
def available() -> bool:
    """Whether XLA knows how to call kernels. Their target is registered here, before executables that were kept on disk are loaded."""
    return ffi.register(TARGET, _run)


def _run(attributes: dict[str, str], arguments: list[torch.Tensor], results: list[torch.Tensor]) -> None:
    _KERNELS[attributes["kernel"]](arguments, results, **_options(attributes["options"]))


@functools.lru_cache(maxsize=1024)
def _options(text: str) -> dict[str, Any]:
    found: dict[str, Any] = ast.literal_eval(text)
    return found
