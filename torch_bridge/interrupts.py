"""Holding back Ctrl-C while something must not stop half-way."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any


class Deferred:
    """The interrupts that arrived meanwhile."""

    def __init__(self) -> None:
        self.caught: list[Any] = []


@contextlib.contextmanager
def deferred() -> Iterator[Deferred | None]:
    """Keep Ctrl-C until the block ends, then deliver it. Gives None (and does nothing) off the main thread, where Python delivers no signals."""
    previous = signal.getsignal(signal.SIGINT) if threading.current_thread() is threading.main_thread() else None
    if not callable(previous):
        yield None
        return
    state = Deferred()
    signal.signal(signal.SIGINT, lambda *args: state.caught.append(args))
    try:
        yield state
    finally:
        signal.signal(signal.SIGINT, previous)
        if state.caught:
            previous(*state.caught[-1])
