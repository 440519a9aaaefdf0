"""`torch.load(..., map_location="xla")`.

torch.load restores bytes to a storage first and makes tensors of it. An xla tensor has no torch storage, so the bytes stay on the CPU, in a storage that says
it is on xla; `tensor.set_(storage, ...)` uploads them, once per storage, so that tensors that share one in the file (tied weights) share one on the device.
"""

from __future__ import annotations

from typing import Any

import torch

from torch_bridge.recorder.host_storage import HostStorage


def _tag(storage: Any) -> str | None:
    """xla tensors are saved by `XLATensor.__reduce_ex__`, which asks for a storage's location in files of torch's older format alone."""
    return str(storage.device) if isinstance(storage, HostStorage) else None


def _restore(storage: torch.UntypedStorage, location: str) -> torch.UntypedStorage | None:
    if location.partition(":")[0] != "xla":
        return None
    storage.__class__ = HostStorage
    return storage


def install() -> None:
    """Take the location "xla" before torch's generic rule for external backends (priority 23) does."""
    torch.serialization.register_package(15, _tag, _restore)  # type: ignore[arg-type]
