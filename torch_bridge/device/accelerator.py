"""`torch.accelerator` where xla is the accelerator: what torch asks of a device's C++ code, for which Python has no hooks.

Without these its functions end in internal assertions.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any, NoReturn

from torch_bridge.device import device_module
from torch_bridge.runtime import backend

_MODULES = [name for name in ("torch.accelerator", "torch.accelerator.memory") if importlib.util.find_spec(name) is not None]


def install() -> None:
    """Put ours in the place of torch's functions (once)."""
    for name, own in _OWN.items():
        for module in map(importlib.import_module, _MODULES):
            if hasattr(module, name):
                setattr(module, name, own)


def synchronize(device: Any = None, /) -> None:
    """Run what is recorded and wait until the device is done."""
    if backend.started:
        device_module.synchronize()


def empty_cache() -> None:
    """Nothing to do: JAX owns the memory."""
    device_module.empty_cache()


def memory_allocated(device: Any = None, /) -> int:
    """Bytes in use."""
    return _usage()["bytes_used"] if backend.started else 0


def max_memory_allocated(device: Any = None, /) -> int:
    """The most bytes that were in use since the process began, where JAX counts them; else those of now."""
    return _usage()["peak_bytes_used"] if backend.started else 0


def get_memory_info(device: Any = None, /) -> tuple[int, int]:
    """Free and total bytes."""
    found = _usage()
    return max(0, found["bytes_limit"] - found["bytes_used"]), found["bytes_limit"]


def _usage() -> dict[str, int]:
    from torch_bridge.telemetry import memory

    return memory.usage()


def _refuses(name: str) -> Callable[..., NoReturn]:
    def refuse(*args: object, **kwargs: object) -> NoReturn:
        raise NotImplementedError(
            f"torch.accelerator.{name} on xla: JAX owns the memory, and counts its peak from the start of the process. memory_allocated(), "
            "max_memory_allocated(), get_memory_info() and torch_xla.core.xla_model.get_memory_info() say what is used"
        )

    return refuse


_OWN: dict[str, Callable[..., Any]] = {
    "synchronize": synchronize,
    "empty_cache": empty_cache,
    "memory_allocated": memory_allocated,
    "max_memory_allocated": max_memory_allocated,
    "memory_reserved": memory_allocated,
    "max_memory_reserved": max_memory_allocated,
    "get_memory_info": get_memory_info,
    **{name: _refuses(name) for name in ("memory_stats", "reset_peak_memory_stats", "reset_accumulated_memory_stats")},
}
