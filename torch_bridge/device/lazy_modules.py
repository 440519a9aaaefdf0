"""Parameters and buffers without a shape (`nn.LazyLinear`), made on xla or moved there.

torch makes them of a tensor's memory, which xla tensors do not have: `recorder/uninitialized.py` has classes of ours for the device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from torch_bridge.runtime import backend


def install() -> None:
    """Let torch's constructors make ours where the device is xla."""
    for kind in (UninitializedParameter, UninitializedBuffer):
        kind.__new__ = _on_any_device(kind, kind.__new__)  # type: ignore[method-assign]


def _on_any_device(kind: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    def __new__(cls: Any, requires_grad: bool = kind is UninitializedParameter, device: Any = None, dtype: Any = None, **more: Any) -> Any:
        if cls is kind and torch.device(torch.get_default_device() if device is None else device).type == "xla":
            return _on_xla(kind)(requires_grad, device, dtype, **more)
        return original(cls, requires_grad, device, dtype, **more)

    return __new__


def _on_xla(kind: type) -> Any:
    """Our class for torch's."""
    from torch_bridge.recorder import uninitialized

    backend.ensure()
    return uninitialized.XLAUninitializedParameter if kind is UninitializedParameter else uninitialized.XLAUninitializedBuffer


def converted(lazy: Any, fn: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """What stands for `lazy` where `fn` (a module's conversion) puts tensors, with their dtype."""
    with torch.no_grad():
        sample = fn(torch.empty(0, dtype=lazy.data.dtype, device=lazy.data.device))
    kind: Any = UninitializedParameter if isinstance(lazy, UninitializedParameter) else UninitializedBuffer
    more = {} if kind is UninitializedParameter else {"persistent": lazy.persistent}
    return kind(lazy.requires_grad, sample.device, sample.dtype, **more)
