"""What heaps of threads keep goes back where it grows, and not more often than it is worth."""

from __future__ import annotations

import ctypes

import pytest

from tests.torch_bridge.devices import python
from torch_bridge.config import freed_memory, idle_heaps
from torch_bridge.config.idle_heaps import EVERY, LOOK, SETTLED, IdleHeaps

MB = 1 << 20


class Process:
    """A process with so many bytes in use, and others that its heaps keep."""

    def __init__(self, used: int = 1000 * MB):
        self.used, self.kept, self.now, self.trims = used, 0, 0.0, 0
        self.heaps = IdleHeaps(self._trim, lambda: self.used + self.kept, lambda: self.now)

    def _trim(self) -> None:
        self.trims += 1
        self.kept = 0

    def run(self, programs: int, seconds: float = 1.0) -> None:
        for _ in range(programs):
            self.heaps.ran()
            self.now += seconds


def test_what_idle_heaps_keep_goes_back() -> None:
    process = Process()
    process.run(SETTLED)
    for _ in range(10):  # ever other threads run programs
        process.kept += 40 * MB
        process.run(EVERY)
    assert process.trims == 2 and process.kept == 0


def test_the_temporaries_of_those_that_go_on_are_left() -> None:
    """They are part of what is held when the last programs have run."""
    process = Process()
    process.run(SETTLED)
    process.kept = 500 * MB
    process.run(EVERY)
    assert process.trims == 1
    process.kept = 500 * MB  # asked for again, by the next program
    process.run(10 * SETTLED)
    assert process.trims == 1


def test_little_is_left_alone() -> None:
    process = Process()
    process.run(SETTLED)
    process.kept = 90 * MB
    process.run(10 * SETTLED)
    assert process.trims == 0


def test_clearing_takes_a_small_part_of_the_time() -> None:
    """4 GB take 2 seconds to clear: not more often than every 64 seconds."""
    process = Process()
    times = []
    for _ in range(20):
        process.run(SETTLED, 0.1)
        before = process.trims
        process.kept += 4096 * MB
        process.run(EVERY, 0.1)
        if process.trims > before:
            times.append(process.now)
    assert len(times) == 2 and times[1] - times[0] > 60


def test_after_another_trim_it_waits_until_the_heaps_are_full_again() -> None:
    process = Process()
    process.run(SETTLED)
    process.heaps.trimmed()
    process.kept = 500 * MB
    process.run(10 * SETTLED)
    assert process.trims == 0


def test_memory_is_not_looked_at_more_often_than_it_is_worth() -> None:
    process = Process()
    looks = []
    process.heaps = IdleHeaps(lambda: None, lambda: looks.append(process.now) or MB, lambda: process.now)
    process.run(SETTLED + 800, 0.001)
    assert 0.8 / LOOK - 2 <= len(looks) <= 0.8 / LOOK + 1


def test_where_the_system_does_not_say_nothing_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*args: object) -> None:
        raise FileNotFoundError

    monkeypatch.setattr("builtins.open", missing)
    assert idle_heaps.resident_bytes() == 0


THREADS = """
import ctypes, queue, threading, time
import torch
from torch_bridge.config import freed_memory, idle_heaps
freed_memory.HEAPS_UP_TO = 1 << 40
import torch_xla
x = torch.ones(4, device="xla")
def run(n):
    for k in range(n):
        (x * 2).sum().item()
run(8)
freed_memory.trim()
run(idle_heaps.SETTLED + idle_heaps.EVERY)
library = ctypes.CDLL(None)
library.malloc.restype, library.malloc.argtypes, library.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
waiting, done = [], []
def keep():  # a thread of a pool that runs a program and then waits
    blocks = [library.malloc(40 << 20) for _ in range(2)]
    for block in blocks: ctypes.memset(block, 1, 40 << 20)
    for block in blocks: library.free(block)
    done.append(1)
    end.wait()
end = threading.Event()
threads = [threading.Thread(target=keep) for _ in range(4)]
before = idle_heaps.resident_bytes()
for thread in threads: thread.start()
while len(done) < 4: pass
kept = idle_heaps.resident_bytes() - before
time.sleep(idle_heaps.LOOK)
run(2 * idle_heaps.EVERY)
left = idle_heaps.resident_bytes() - before
end.set()
print(kept >> 20, left >> 20)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "gnu_get_libc_version"), reason="the C library is not glibc")
def test_threads_that_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [*freed_memory._OWN, "GLIBC_TUNABLES", "LD_PRELOAD", "JAX_COMPILATION_CACHE_DIR"]:
        monkeypatch.delenv(name, raising=False)
    kept, left = map(int, python(THREADS, timeout=200).split())
    assert kept > 250 and left < kept * 0.6, "glibc leaves what lies at the end of a heap: one of two blocks"
