"""Ops without a tensor argument, which torch sends straight to the backend instead of `__torch_dispatch__`.

Registered for PrivateUse1 by `registration.register`; each first use imports the recorder.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.types import Device

from torch_bridge.runtime import backend

aten = torch.ops.aten


def empty(
    size: Sequence[int],
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: Device = None,
    pin_memory: bool | None = None,
    memory_format: torch.memory_format | None = None,
) -> Any:
    from torch_bridge.recorder import op_rules

    backend.ensure()
    from torch_bridge.ir import layout as layouts

    meta = torch.empty(size, dtype=dtype, device="meta", memory_format=memory_format)
    return op_rules.uninitialized(layouts.base_of_meta(meta))


def empty_strided(
    size: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: Device = None,
    pin_memory: bool | None = None,
) -> Any:
    from torch_bridge.recorder import op_rules

    backend.ensure()
    from torch_bridge.ir import layout as layouts

    return op_rules.uninitialized(layouts.base_of(tuple(size), tuple(stride), dtype or torch.get_default_dtype()))


def _recorded(op: torch._ops.OpOverload) -> Any:
    """A factory that is recorded as a node of its own."""

    def factory(
        *args: Any, layout: torch.layout | None = None, device: Device = None, pin_memory: bool | None = None, **kwargs: Any
    ) -> Any:
        from torch_bridge.recorder import dispatch

        backend.ensure()

        if kwargs.get("dtype", 0) is None:
            del kwargs["dtype"]
        return dispatch.dispatch(op, args, {**kwargs, "device": device})

    return factory


def copy_from(src: torch.Tensor, dst: torch.Tensor, non_blocking: bool = False) -> Any:
    from torch_bridge.recorder import dispatch

    backend.ensure()

    return dispatch.dispatch(aten._copy_from.default, (src, dst, non_blocking), {})


def copy_from_and_resize(src: torch.Tensor, dst: torch.Tensor) -> Any:
    from torch_bridge.recorder import dispatch

    backend.ensure()

    return dispatch.dispatch(aten._copy_from_and_resize.default, (src, dst), {})


def local_scalar_dense(x: Any) -> Any:
    """`torch.tensor([x, ...])` reads its elements past `__torch_dispatch__`."""
    from torch_bridge.recorder import dispatch

    backend.ensure()

    return dispatch.dispatch(aten._local_scalar_dense.default, (x,), {})


def _made_on_cpu(op: torch._ops.OpOverload) -> Any:
    """A factory that is computed by a kernel of torch's, which no backend in Python can have: the CPU's is taken, and its result uploaded."""

    def factory(
        *args: Any, layout: torch.layout | None = None, device: Device = None, pin_memory: bool | None = None, **kwargs: Any
    ) -> Any:
        return op(*args, **kwargs, device="cpu").to("xla")

    return factory


def _composite(name: str) -> Any:
    """Our own rule for an op that torch would decompose before we see it."""

    def rule(*args: Any, **kwargs: Any) -> Any:
        from torch_bridge.recorder import op_rules

        backend.ensure()

        return getattr(op_rules, name)(*args, **kwargs)

    return rule


RECORDED = [
    aten.arange.default,
    aten.arange.start,
    aten.arange.start_step,
    aten.randperm.default,
    aten.randperm.generator,
    aten.tril_indices.default,
    aten.triu_indices.default,
]

MADE_ON_CPU = [aten.kaiser_window.default, aten.kaiser_window.periodic, aten.kaiser_window.beta]


def install(library: torch.library.Library, autograd: torch.library.Library) -> None:
    """Register everything above for the device."""
    library.impl("empty.memory_format", empty)
    library.impl("empty_strided", empty_strided)
    library.impl("_efficientzerotensor", empty)  # what was never written reads as zeros
    library.impl("_copy_from", copy_from)
    library.impl("_local_scalar_dense", local_scalar_dense)
    library.impl("_copy_from_and_resize", copy_from_and_resize)
    for op in RECORDED:
        library.impl(op, _recorded(op))
    for op in MADE_ON_CPU:
        library.impl(op, _made_on_cpu(op))
    for name, rule in (("scaled_dot_product_attention", "attention"), ("real", "real"), ("imag", "imag")):
        autograd.impl(name, _composite(rule))
