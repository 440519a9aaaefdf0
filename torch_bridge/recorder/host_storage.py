"""Storages of tensors on xla as `torch.load` fills them: bytes on the CPU, uploaded when a tensor is made of them."""

from __future__ import annotations

from typing import Any

import torch


class HostStorage(torch.UntypedStorage):
    """Bytes on the CPU for tensors on xla. `uploaded` is their device storage, once there is one."""

    uploaded: Any = None

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("xla:0")


def device_storage(host: HostStorage, dtype: torch.dtype) -> Any:
    """The device storage with the bytes of `host`, uploaded as a flat tensor of `dtype` the first time."""
    if host.uploaded is None:
        from torch_bridge.recorder.copies import upload

        host.__class__ = torch.UntypedStorage  # type: ignore[assignment]
        flat = torch.empty(0, dtype=dtype).set_(host, 0, (host.nbytes() // dtype.itemsize,), (1,))
        host.__class__ = HostStorage
        host.uploaded = upload(flat)._storage
    return host.uploaded
