"""The kernels by name, how a program that is traced calls one, and whether it does."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
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

Fill = Callable[..., None]
"""`fn(arguments, results, **options)`, which fills the results."""
Flags = tuple[tuple[bool, ...], tuple[bool, ...]]
"""Something of each argument and of each result."""
Order = tuple[int, ...]
"""For each dim of a buffer, as it lies, the dim of the tensor that it is."""


@dataclasses.dataclass(frozen=True)
class Kernel:
    """What computes, and for its options which arguments and results are images that it takes with their channels last as well."""

    fill: Fill
    images: Callable[..., Flags] | None


_KERNELS: dict[str, Kernel] = {}
_USING = jax.make_user_context(False)
"""Part of the keys of what JAX keeps of traced functions."""


def kernel(name: str, images: Callable[..., Flags] | None = None) -> Callable[[Fill], Fill]:
    """Register `fn(arguments, results, **options)` under a name. arguments, results: lists of CPU tensors; arguments are read only.

    images: of the options, which of them may lie with their channels last; all others are contiguous.
    """

    def register(fn: Fill) -> Fill:
        if name in _KERNELS:
            raise ValueError(f"there is a kernel {name!r} already ({_KERNELS[name].fill.__module__})")
        _KERNELS[name] = Kernel(fn, images)
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
    return _call(name, results, arrays, repr(options), orders="()")


def _call(
    name: str, results: Sequence[jax.ShapeDtypeStruct | jax.Array], arrays: Sequence[Any], options: str, orders: str
) -> tuple[Any, ...]:
    made = jax.ffi.ffi_call(TARGET, [jax.ShapeDtypeStruct(r.shape, r.dtype) for r in results], vmap_method="sequential")(
        *arrays, kernel=name, options=options, orders=orders
    )
    return tuple(made)


def images_of(eqn: Any) -> Flags | None:
    """Which operands and results of an equation are images that may lie with their channels last; None: it calls no kernel that has such."""
    if eqn.primitive.name != "ffi_call" or eqn.params["target_name"] != TARGET:
        return None
    attributes = dict(eqn.params["attributes"])
    images = _KERNELS[attributes["kernel"]].images
    return None if images is None else images(**_literal(attributes["options"]))


def call_lying(eqn: Any, arrays: Sequence[Any], orders: Sequence[Order]) -> tuple[Any, ...]:
    """The results of an equation of `images_of` for operands that lie in the first of the orders; they lie in the last of them."""
    attributes = dict(eqn.params["attributes"])
    of_results = orders[len(arrays) :]
    results = [
        jax.ShapeDtypeStruct(tuple(a.shape[d] for d in order), a.dtype)
        for a, order in zip(eqn.params["result_avals"], of_results, strict=True)
    ]
    return _call(attributes["kernel"], results, arrays, attributes["options"], repr(tuple(orders)))


@functools.cache
def available() -> bool:
    """Whether XLA knows how to call kernels. Their target is registered here, before executables that were kept on disk are loaded."""
    return ffi.register(TARGET, _run)


def _run(attributes: dict[str, str], arguments: list[torch.Tensor], results: list[torch.Tensor]) -> None:
    orders = _literal(attributes["orders"])
    if orders:
        tensors = [_in_torchs_order(t, order) for t, order in zip([*arguments, *results], orders, strict=True)]
        arguments, results = tensors[: len(arguments)], tensors[len(arguments) :]
    _KERNELS[attributes["kernel"]].fill(arguments, results, **_literal(attributes["options"]))


def _in_torchs_order(buffer: torch.Tensor, order: Order) -> torch.Tensor:
    """The tensor that a buffer with its dims in an order holds."""
    return buffer.permute(sorted(range(len(order)), key=order.__getitem__))


@functools.lru_cache(maxsize=1024)
def _literal(text: str) -> Any:
    return ast.literal_eval(text)
