"""Pinned host memory does not exist here: asking for it (`DataLoader(pin_memory=True)`) gives ordinary memory.

Without this, torch would ask the xla backend for an allocator that it does not have, and raise for CPU tensors too.
"""

from __future__ import annotations

import torch
from torch.types import Device


def pin_memory(t: torch.Tensor, device: Device = None) -> torch.Tensor:
    return t.clone()


def is_pinned(t: torch.Tensor, device: Device = None) -> bool:
    return False


def install(library: torch.library.Library) -> None:
    """Register both for CPU tensors."""
    library.impl("_pin_memory", pin_memory)
    library.impl("is_pinned", is_pinned)
