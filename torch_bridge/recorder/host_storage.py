"""Storages of tensors on xla as `torch.load` fills them: bytes on the CPU, uploaded when a tensor is made of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class HostStorage(torch.UntypedStorage):
    """Bytes on the CPU for tensors on xla. uploaded: their device storage, once there is one. upload_again: what brings later bytes there."""

    uploaded: Any = None
    upload_again: Callable[[], None] | None = None

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("xla:0")

    def _set_from_file(self, *args: Any) -> Any:
        """What `torch.load` does with files of torch's older format: their bytes follow the pickled tensors, which are made before."""
        found = super()._set_from_file(*args)
        if self.upload_again is not None:
            self.upload_again()
        return found
