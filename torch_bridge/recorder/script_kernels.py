"""Kernels that scripts register for ops on xla tensors with `torch.library`: `lib.impl(name, fn, "XLA")`, `custom_op`, `register_kernel("xla")`.

As with any device, such a kernel is called with the xla tensors themselves, below autograd. What it does to them is recorded.
"""

from __future__ import annotations

from typing import Any

import torch

from torch_bridge import lowerings, source
from torch_bridge.errors import UnsupportedOpError

_FOR_XLA = "XLA"
"""The key that scripts name. torch has no kernels there, not even of aten."""

_FOR_ALL = ("PrivateUse1", "CompositeExplicitAutograd")
"""Keys under which `torch.library` keeps a kernel for "xla", and one for every device. torch and we have kernels there, of aten and of collectives."""

_ON_CPU = ("CPU", "CompositeExplicitAutograd", "CompositeImplicitAutograd", "CompositeExplicitAutogradNonFunctional")

_OURS = frozenset({"aten", "c10d", "torch_bridge"})


def find(op: torch._ops.OpOverload) -> Any:
    """The dispatch keys whose kernel runs an op, None if a script has registered none. A JAX lowering comes before a kernel for all devices."""
    name = op.name()
    if torch._C._dispatch_has_kernel_for_dispatch_key(name, _FOR_XLA):
        return _keys(_FOR_XLA)
    if op.namespace in _OURS or lowerings.lookup(op) is not None:
        return None
    return next((_keys(key) for key in _FOR_ALL if torch._C._dispatch_has_kernel_for_dispatch_key(name, key)), None)


def _keys(name: str) -> Any:
    return torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, name))


def run(op: torch._ops.OpOverload, keys: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
    """Call the kernel with the arguments as they are."""
    with torch._C._AutoDispatchBelowAutograd():
        return op.redispatch(keys, *args, **(kwargs or {}))


def check_cpu(op: torch._ops.OpOverload) -> None:
    """UnsupportedOpError for an op of a script that not even the CPU has a kernel for."""
    if op.namespace in _OURS or any(torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), key) for key in _ON_CPU):
        return
    raise UnsupportedOpError(
        f"{op} has no kernel that takes xla tensors, and none for the CPU (at {source.user_line()}). Register one that is made of torch functions: "
        f'torch.library.impl("{op.name()}", "XLA", function), or write it in JAX: @torch_bridge.lowerings.lowering(torch.ops.{op}).'
    )
