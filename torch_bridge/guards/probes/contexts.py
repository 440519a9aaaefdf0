"""What `with` enters."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import torch

from torch_bridge.guards.observer import ACTIVE, Observer


def context(x: object) -> Any:
    """What `with` enters."""
    observer = ACTIVE.observer
    if observer is not None and not observer.reason and not _known_context(observer, x):
        observer.refuse(f"it enters a {type(x).__name__}")
    return x


_CONTEXTS = (
    torch.autocast,
    torch.no_grad,
    torch.enable_grad,
    torch.set_grad_enabled,
    torch.autograd.profiler.record_function,
    contextlib.nullcontext,
    contextlib.suppress,
    contextlib._GeneratorContextManager,
    type(threading.Lock()),
    type(threading.RLock()),
)


def _known_context(observer: Observer, x: object) -> bool:
    """Whether entering and leaving it does nothing but what torch's settings say, or what routed code does."""
    kind = type(x)
    if kind is contextlib._GeneratorContextManager:
        return observer.is_own(x)
    return kind in _CONTEXTS or kind.__module__.startswith(("torch_bridge.", "nxd_jax."))
