"""`nn.DataParallel` with the device xla: a process has one, so the wrapped module is called as it is, wherever it lies.

torch takes any device that is there for several to share a batch out to: it would put a module that is on the CPU on xla, and cut batches with CUDA's code.
"""

from __future__ import annotations

import importlib
from typing import Any

torchs: Any = importlib.import_module("torch.nn.parallel.data_parallel")  # its package has a function of the same name
_original = torchs._get_available_device_type


def install() -> None:
    """Let torch's `DataParallel` see other devices only (once)."""
    torchs._get_available_device_type = _beside_xla


def _beside_xla() -> str | None:
    found = _original()
    return None if found == "xla" else found
