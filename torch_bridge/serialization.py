"""`torch.load(..., map_location="xla")`.

torch.load restores bytes to a storage first and makes tensors of it. An xla tensor has no torch storage, so the bytes stay on the CPU, in a storage that says
it is on xla; `tensor.set_(storage, ...)` uploads them, once per storage, so that tensors that share one in the file (tied weights) share one on the device.
"""

from __future__ import annotations

from typing import Any

import torch


class HostStorage(torch.UntypedStorage):
    """Bytes on the CPU for tensors on xla. `uploaded` is their device storage, once there is one."""

    uploaded: Any = None

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("xla:0")


def _tag(storage: Any) -> None:
    """xla tensors are saved by `XLATensor.__reduce_ex__`, which never asks for a storage's location."""


def _restore(storage: torch.UntypedStorage, location: str) -> torch.UntypedStorage | None:
    if location.partition(":")[0] != "xla":
        return None
    storage.__class__ = HostStorage
    return storage


def install() -> None:
    """Take the location "xla" before torch's generic rule for external backends (priority 23) does."""
    torch.serialization.register_package(15, _tag, _restore)  # type: ignore[arg-type]


def device_storage(host: HostStorage, dtype: torch.dtype) -> Any:
    """The device storage with the bytes of `host`, uploaded as a flat tensor of `dtype` the first time."""
    if host.uploaded is None:
        from torch_bridge.transfer import upload

        host.__class__ = torch.UntypedStorage  # type: ignore[assignment]
        flat = torch.empty(0, dtype=dtype).set_(host, 0, (host.nbytes() // dtype.itemsize,), (1,))
        host.__class__ = HostStorage
        host.uploaded = upload(flat)._storage
    return host.uploaded
