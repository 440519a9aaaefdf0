"""Executions that may not have finished: a script may be so many of them ahead of the devices, and no more.

Counted for each place by itself: each stage of a pipeline has its own devices, and one that may queue nothing because others are busy would idle.
"""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any

from torch_bridge.mesh.places import Place


class InFlight:
    """A result of each execution that may not have finished, by the place where it runs, in their order. Results are held weakly."""

    def __init__(self) -> None:
        self._queues: dict[Place, deque[weakref.ref[Any]]] = {}
        self._last: weakref.ref[Any] | None = None

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def add(self, place: Place, result: Any) -> None:
        """An execution was queued. result: an array of its results."""
        self._last = weakref.ref(result)
        self._queues.setdefault(place, deque()).append(self._last)

    def wait(self, beyond: int = 0) -> None:
        """Until no place has more than so many executions that have not finished. Raises what they raise."""
        for place, queue in list(self._queues.items()):
            while len(queue) > beyond:
                _wait(queue.popleft())
            if not queue:
                del self._queues[place]

    def over(self, limit: int) -> bool:
        """Whether a place has more than so many."""
        return any(len(queue) > limit for queue in self._queues.values())

    def is_idle(self) -> bool:
        """Whether the execution that was queued last has finished, or nobody has its result any more."""
        last = None if self._last is None else self._last()
        return last is None or last.is_deleted() or last.is_ready()


def _wait(result: weakref.ref[Any]) -> None:
    """Until a result is computed, if anyone still has it."""
    array = result()
    if array is not None and not array.is_deleted():
        array.block_until_ready()
