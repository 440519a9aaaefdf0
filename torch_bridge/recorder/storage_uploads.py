"""From the bytes that `torch.load` reads to storages on the device."""

from __future__ import annotations

from typing import Any

import torch

from torch_bridge.ir.segment import Storage
from torch_bridge.recorder.copies import upload
from torch_bridge.recorder.host_storage import HostStorage
from torch_bridge.recorder.tensor import make


def device_storage(host: HostStorage, dtype: torch.dtype) -> Storage:
    """The device storage with the bytes of `host`, uploaded as a flat tensor of `dtype` the first time."""
    if host.uploaded is None:
        storage = host.uploaded = _uploaded(host, dtype)

        def again() -> None:
            with torch.no_grad():
                make(storage.layout, storage).copy_(make(storage.layout, _uploaded(host, dtype)))

        host.upload_again = again
    found: Storage = host.uploaded
    return found


def _uploaded(host: HostStorage, dtype: torch.dtype) -> Any:
    host.__class__ = torch.UntypedStorage  # type: ignore[assignment]
    flat = torch.empty(0, dtype=dtype).set_(host, 0, (host.nbytes() // dtype.itemsize,), (1,))
    host.__class__ = HostStorage
    return upload(flat)._storage
