"""Timing on a machine that others use too: wait for a moment in which nobody else runs, see how much of the cores others had while something was timed, and
keep the times with least of that (Linux)."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

_TICKS = os.sysconf("SC_CLK_TCK")


def busy_seconds() -> float:
    """Seconds that all cores together have worked since the start of the machine."""
    user, nice, system, _, _, irq, softirq, *_ = map(int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:])
    return (user + nice + system + irq + softirq) / _TICKS


def process_seconds(pids: Iterable[int]) -> float:
    """CPU seconds that processes have taken."""
    found = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        found += int(fields[11]) + int(fields[12])
    return found / _TICKS


def quietest(found: Sequence[Any], others: Callable[[Any], float], count: int = 5) -> list[Any]:
    """Those during which others had least of the cores."""
    return sorted(found, key=others)[:count]


def wait(limit: float = 1.0) -> None:
    """Wait until nothing but this process wants a core, but no more than `limit` seconds."""
    ends = time.monotonic() + limit
    while time.monotonic() < ends:
        running = next(line for line in Path("/proc/stat").read_text().splitlines() if line.startswith("procs_running"))
        if int(running.split()[1]) <= 1:
            return
        time.sleep(0.003)


class Watch:
    """What others take of the cores from now on, beside the processes `pids`."""

    def __init__(self, pids: Iterable[int]):
        self.pids = tuple(pids)
        self.before = self._others()
        self.started = time.perf_counter()

    def _others(self) -> float:
        return busy_seconds() - process_seconds(self.pids)

    def share(self) -> float:
        """Their share so far, 0 to 1."""
        return max(self._others() - self.before, 0) / ((time.perf_counter() - self.started) * (os.cpu_count() or 1))
