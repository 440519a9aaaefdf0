"""The session: whether JAX is up yet. It comes up with the first xla tensor, or with what else needs it, and not before."""

from __future__ import annotations

import threading
from collections.abc import Callable

started = False
"""Whether xla tensors behave as such in this process, and JAX is imported."""

_bring_up: Callable[[], None] | None = None
_lock = threading.RLock()
_coming_up = False


def start_with(bring_up: Callable[[], None]) -> None:
    """Say how JAX and the recorder are brought up (`device.registration`)."""
    global _bring_up
    _bring_up = bring_up


def ensure() -> None:
    """Bring them up, unless they are."""
    if not started:
        _start()


def _start() -> None:
    global started, _coming_up
    with _lock:
        if started or _coming_up:
            return
        if _bring_up is None:
            raise RuntimeError("device 'xla' is not registered with torch in this process: import torch_bridge first")
        _coming_up = True
        try:
            _bring_up()
            started = True
        finally:
            _coming_up = False
