"""What is known of calls and views, kept within bounds: a loop over data on the device (`data[i : i + 32]`) has others in every step."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")
MOST = 4096
"""Entries of a table from which on it forgets what can be made again."""


class Bounded(dict[K, V]):
    """A table that forgets, once it has grown: `again` says of a value whether one made anew is as good. What it must keep is kept, however much that is."""

    def __init__(self, again: Callable[[V], bool]):
        super().__init__()
        self._again = again
        self._most = MOST

    def add(self, key: K, value: V) -> V:
        """Note a value, which is returned."""
        if len(self) >= self._most:
            for k, known in list(self.items()):
                if self._again(known):
                    self.pop(k, None)
            self._most = max(MOST, 2 * len(self))
        self[key] = value
        return value
