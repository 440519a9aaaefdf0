"""Calls that work on xla and, with `NXD_CPU_MODE=1`, on the CPU alone."""

from __future__ import annotations

import os
from typing import Any

import torch


def cpu_mode() -> bool:
    """`utils.cpu_mode`: whether `NXD_CPU_MODE` is a number above 0. Asked anew at every call (NxD: once, at import)."""
    return int(os.environ.get("NXD_CPU_MODE") or 0) > 0


def mark_step() -> None:
    """`utils.mark_step`: end the step (`xm.mark_step`); nothing in CPU mode."""
    if not cpu_mode():
        from torch_bridge.runtime import steps

        steps.mark()


def master_print(msg: Any) -> None:
    """`utils.master_print`: print on rank 0 (in CPU mode NxD prints on others too)."""
    from torch_bridge.torch_xla.core import xla_model

    xla_model.master_print(msg)


def get_device() -> torch.device:
    """`utils.get_device`: the xla device, or the CPU in CPU mode."""
    if cpu_mode():
        return torch.device("cpu")
    from torch_bridge import torch_xla

    return torch_xla.device()
