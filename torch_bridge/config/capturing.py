"""Whether this thread captures a module (`export.graph_capture`): for those who tell the script what that changes. Imports nothing."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

_threads = threading.local()


@contextlib.contextmanager
def block() -> Iterator[None]:
    """A block in which the forward of a module runs to be captured."""
    before, _threads.inside = inside(), True
    try:
        yield
    finally:
        _threads.inside = before


def inside() -> bool:
    """Whether this thread is in such a block."""
    return bool(getattr(_threads, "inside", False))
