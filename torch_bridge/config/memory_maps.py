"""Linux gives a process so many memory mappings (`vm.max_map_count`, by default 65530), and XLA ends the process where it gets no more.

Machine code takes three for each object file that LLVM makes: some 140 for a program of a small model. So hundreds of programs may be too many, as a script has
that generates tokens with tensors that grow. Before that, those that were unused for longest are let go of (`runtime.executor`).
"""

from __future__ import annotations

from collections.abc import Callable

MOST = 3 / 4
"""The share of the mappings that may be taken when a program is compiled."""
EACH = 1000
"""Mappings that a program may take."""


def taken() -> int:
    """Mappings of this process; 0 where the system does not say (Linux does). Takes 1 us for each."""
    try:
        with open("/proc/self/maps", "rb") as file:
            return sum(1 for _ in file)
    except OSError:
        return 0


def allowed() -> int:
    """Mappings that a process may have; 0 where the system does not say."""
    try:
        with open("/proc/sys/vm/max_map_count") as file:
            return int(file.read())
    except (OSError, ValueError):
        return 0


class MemoryMaps:
    """Says when mappings run out.

    taken, allowed: mappings that the process has, and may have.
    """

    def __init__(self, taken: Callable[[], int] = taken, allowed: Callable[[], int] = allowed):
        self._taken, self._allowed = taken, allowed
        self._programs = 0

    def are_scarce(self) -> bool:
        """Whether more than `MOST` are taken, as a program is about to be compiled. Counts them no more often than it must."""
        self._programs -= 1
        if self._programs > 0:
            return False
        left = int(self._allowed() * MOST) - self._taken()
        self._programs = left // EACH
        return left < 0

    def __str__(self) -> str:
        return f"{self._taken()} of {self._allowed()} memory mappings"


MAPS = MemoryMaps()
"""Of this process."""
