"""What the heaps of threads that ran a program keep, although other threads run the next ones, goes back to the system now and then.

JAX has a thread for each of the machine's cores, and any of them runs a program: mostly the same one or two, but over minutes all of them. Each keeps the
temporaries of what it ran (`freed_memory`): a Llama of 8 layers grew from 499 to 933 MiB above imports in 360 steps of 16 threads.

So once the process holds much more than when the last programs had run, all heaps give back what is free (`malloc_trim`). Those that go on running programs ask
for theirs again, which takes as long as clearing it; that is kept to a few percent of the time. glibc leaves what lies at the end of each heap, up to a block
(`freed_memory.BLOCK`).
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable

EVERY = 8
"""Programs after which memory is looked at."""
LOOK = 0.05
"""Seconds between two looks, at least: one takes 10 us, and 60 where other work has emptied the caches."""
SETTLED = 32
"""Programs after which the heaps that go on running programs hold their temporaries."""
MORE, ROOM = 1 / 16, 32 << 20
"""How much more memory than then is too much: a share of it, and bytes."""
_PAUSE = 2.0
"""Seconds between two times, at least."""
_CLEARED = 2 << 30
"""Bytes that the system clears in a second, about."""
_SHARE = 1 / 32
"""The share of the time that clearing may take."""


def resident_bytes() -> int:
    """Memory that this process holds; 0 where the system does not say (Linux does)."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * mmap.PAGESIZE
    except (OSError, IndexError, ValueError):
        return 0


class IdleHeaps:
    """Gives back what heaps keep, where that grows.

    trim: makes all heaps give back what is free. resident: bytes of memory that the process holds. clock: seconds.
    """

    def __init__(self, trim: Callable[[], None], resident: Callable[[], int] = resident_bytes, clock: Callable[[], float] = time.monotonic):
        self._trim, self._resident, self._clock = trim, resident, clock
        self._runs = 0
        self._level: int | None = None
        self._not_before = 0.0
        self._next_look = 0.0

    def trimmed(self) -> None:
        """All heaps have given back what was free."""
        self._runs, self._level = 0, None

    def ran(self) -> None:
        """A program runs."""
        self._runs += 1
        if self._runs % EVERY or self._runs < SETTLED or (now := self._clock()) < self._next_look:
            return
        self._next_look = now + LOOK
        held = self._resident()
        if self._level is None or held < self._level:
            self._level = held
        elif held > self._level * (1 + MORE) + ROOM and now >= self._not_before:
            self._trim()
            self.trimmed()
            self._not_before = self._clock() + max(_PAUSE, max(0, held - self._resident()) / _CLEARED / _SHARE)
