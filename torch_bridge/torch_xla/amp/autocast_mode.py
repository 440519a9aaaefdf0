"""`torch_xla.amp.autocast_mode`."""

from __future__ import annotations

from typing import Any

import torch


class autocast(torch.autocast):
    """`torch_xla.amp.autocast`: `torch.autocast` for the type of `device`."""

    def __init__(self, device: Any = "xla", enabled: bool = True, dtype: torch.dtype | None = None, cache_enabled: bool = True):
        super().__init__(torch.device(device).type, dtype=dtype or torch.bfloat16, enabled=enabled, cache_enabled=cache_enabled)
