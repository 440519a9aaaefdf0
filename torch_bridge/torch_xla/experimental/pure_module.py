"""`torch_xla.experimental.pure_module`."""

from __future__ import annotations

from typing import Any

import torch

import torch_bridge


class PureModule(torch.nn.Module):
    """`pure_module.PureModule`: a module that a script promises to be pure, as `_module`; it is played from recordings, which sees for itself what changes."""

    def __init__(self, module: torch.nn.Module):
        super().__init__()
        self._module = torch_bridge.optimize(module)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the module gives."""
        return self._module(*args, **kwargs)
