"""SIGTERM as a mark that the job is about to end (`torch_xla._XLAC._sync_point_reached`)."""

from __future__ import annotations

import signal
import threading
from typing import Any

from torch_bridge.mesh import processes, world

__all__ = ["activate", "deactivate", "reached"]

_come = threading.Event()
_before: list[Any] = []


def activate() -> None:
    """Note SIGTERM, and call the handler that was there. Raises RuntimeError outside the main thread, where Python sets no handlers."""
    if _before:
        return
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("_activate_preemption_sync_manager: call it in the main thread, Python sets handlers of signals nowhere else")
    _before.append(signal.signal(signal.SIGTERM, _note))


def deactivate() -> None:
    """Put the handler back that was there before `activate`, and forget signals."""
    if _before:
        signal.signal(signal.SIGTERM, _before.pop() or signal.SIG_DFL)
    _come.clear()


def reached() -> bool:
    """Whether SIGTERM has come, to any process. Raises RuntimeError before `activate`."""
    if not _before:
        raise RuntimeError("_sync_point_reached: call torch_xla._XLAC._activate_preemption_sync_manager() first")
    if world.process_count() == 1:
        return _come.is_set()
    return any(told == b"1" for told in processes.exchange("preemption", b"1" if _come.is_set() else b"0"))


def _note(number: int, frame: Any) -> None:
    _come.set()
    if callable(_before[0]):
        _before[0](number, frame)
