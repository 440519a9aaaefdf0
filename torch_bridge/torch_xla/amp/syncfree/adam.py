"""`torch_xla.amp.syncfree.adam`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torch_bridge.optimizers.skippable import stepped_unless


class Adam(torch.optim.Adam):
    """`torch_xla.amp.syncfree.Adam`: `torch.optim.Adam`, whose step changes nothing if `found_inf` (a tensor on the device) is not 0."""

    def step(self, closure: Callable[[], Any] | None = None, found_inf: torch.Tensor | None = None) -> Any:
        """One step; called off on the device if `found_inf` is given and not 0."""
        if found_inf is None:
            return super().step(closure)
        return stepped_unless(found_inf, self, super().step, closure)
