"""SIGTERM as a mark that the job is about to end (`torch_xla._XLAC._sync_point_reached`)."""

from __future__ import annotations

import signal
import threading
from typing import Any

from torch_bridge.mesh import processes, world

__all__ = ["activate", "come_to_any", "deactivate", "note_in", "reached"]

_come = threading.Event()
_before: list[Any] = []


def activate() -> None:
    """Note SIGTERM, and call the handler that was there. Raises RuntimeError outside the main thread, where Python sets no handlers."""
    if _before:
        return
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("_activate_preemption_sync_manager: call it in the main thread, Python sets handlers of signals nowhere else")
    _before.append(note_in(_come))


def deactivate() -> None:
    """Put the handler back that was there before `activate`, and forget signals."""
    if _before:
        signal.signal(signal.SIGTERM, _before.pop() or signal.SIG_DFL)
    _come.clear()


def reached() -> bool:
    """Whether SIGTERM has come, to any process. Raises RuntimeError before `activate`."""
    if not _before:
        raise RuntimeError("_sync_point_reached: call torch_xla._XLAC._activate_preemption_sync_manager() first")
    return come_to_any(_come, "preemption")


def note_in(event: threading.Event) -> Any:
    """Have SIGTERM set an event, and do then what it did before; the handler that was there."""
    before = signal.getsignal(signal.SIGTERM)

    def note(number: int, frame: Any) -> None:
        event.set()
        if callable(before):
            before(number, frame)

    signal.signal(signal.SIGTERM, note)
    return before


def come_to_any(event: threading.Event, name: str) -> bool:
    """Whether an event is set in any process of the job. All of them ask, under one name."""
    if world.process_count() == 1:
        return event.is_set()
    return any(told == b"1" for told in processes.exchange(name, b"1" if event.is_set() else b"0"))
