"""`torch_xla.utils.keyd_queue`: queues between the threads of a loader, which either side may close."""

from __future__ import annotations

import threading
from collections import deque
from typing import Any


class _Closable:
    """maxsize: items that wait at most."""

    def __init__(self, maxsize: int = 1024):
        self._maxsize = maxsize
        self._changed = threading.Condition()
        self._written = False
        self._closed = False

    def max_size(self) -> int:
        """Items that wait at most."""
        return self._maxsize

    def close_write(self) -> None:
        """Nothing more is put: `get` gives what is left, then None."""
        with self._changed:
            self._written = True
            self._changed.notify_all()

    def close(self) -> None:
        """Nobody gets any more: `put` neither waits nor keeps."""
        with self._changed:
            self._written = self._closed = True
            self._changed.notify_all()


class Queue(_Closable):
    """`Queue`: first in, first out. `put` waits while it is full, `get` while it is empty and open."""

    def __init__(self, maxsize: int = 1024):
        super().__init__(maxsize)
        self._items: deque[Any] = deque()

    def put(self, item: Any) -> None:
        """Add an item once there is room; it is dropped if the queue is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or len(self._items) < self._maxsize)
            if not self._closed:
                self._items.append(item)
                self._changed.notify_all()

    def get(self) -> Any:
        """The oldest item, or None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._items or self._written)
            item = self._items.popleft() if self._items else None
            self._changed.notify_all()
            return item


class KeydQueue(_Closable):
    """`KeydQueue`: items by key. `put` waits while it is full, unless somebody waits for that key."""

    def __init__(self, maxsize: int = 1024):
        super().__init__(maxsize)
        self._items: dict[Any, Any] = {}
        self._awaited: dict[Any, int] = {}

    def put(self, key: Any, item: Any) -> None:
        """Keep an item under its key once there is room; it is dropped if the queue is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or len(self._items) < self._maxsize or key in self._awaited)
            if not self._closed:
                self._items[key] = item
                self._changed.notify_all()

    def get(self, key: Any) -> Any:
        """The item of a key, which is taken out; None if there is none and nothing more is put."""
        with self._changed:
            self._awaited[key] = self._awaited.get(key, 0) + 1
            self._changed.notify_all()
            self._changed.wait_for(lambda: key in self._items or self._written)
            self._awaited[key] -= 1
            if not self._awaited[key]:
                del self._awaited[key]
            item = self._items.pop(key, None)
            self._changed.notify_all()
            return item
