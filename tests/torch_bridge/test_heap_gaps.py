"""Gaps that compiling leaves are held, so that steps do not look through them; they take no memory, and compilations and large programs have them again."""

from __future__ import annotations

import ctypes
import resource
from typing import Any

import pytest

from tests.torch_bridge.devices import python
from tests.torch_bridge.test_freed_memory import USERS
from torch_bridge.config import freed_memory, heap_gaps
from torch_bridge.config.heap_gaps import Gaps

glibc = pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="the C library is not glibc 2.33 or later")

HOLDING = """
import ctypes, random
from torch_bridge.config import freed_memory
from torch_bridge.config.heap_gaps import Gaps

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

freed_memory.HEAPS_UP_TO = -1
assert freed_memory.keep()
library, gaps = ctypes.CDLL(None), Gaps.of(ctypes.CDLL(None))
library.malloc.restype, library.malloc.argtypes, library.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
random.seed(0)
sizes = [random.randrange(1100, 60_000) for _ in range(6000)] + [3 << 20, 100 << 20]
blocks = [library.malloc(size) for size in sizes for _ in range(2)]
for size, block in zip(sizes, blocks[::2]):
    ctypes.memset(block, 1, size)
    library.free(block)  # a gap before the one that stays
before = resident()
several, few = gaps.hold(), gaps.hold()
after = resident()
for block, size in zip(blocks[1::2], sizes):
    ctypes.memset(block, 2, size)  # nobody else's memory was given away
given = library.malloc(50_000)
assert given not in blocks[1::2]
held = gaps.held
gaps.release()
left = gaps.held
print(several, few, gaps.hold(), before - after, sum(sizes), held, left)
"""
STEPS = """
import torch, torch_xla.core.xla_model as xm
from torch_bridge.config import freed_memory
freed_memory._LONG, freed_memory.HEAPS_UP_TO = 0.05, -1
model = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(32 + k, 33 + k), torch.nn.GELU()) for k in range(16)]).to("xla")
optimizer = torch.optim.AdamW(model.parameters())
x = torch.ones(8, 32, device="xla")
for _ in range(4):
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    xm.mark_step()
    loss.item()
from torch_bridge.config.heap_gaps import Gaps
import ctypes
print(Gaps.of(ctypes.CDLL(None)).hold())
"""


@pytest.fixture(autouse=True)
def _no_settings_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in USERS:
        monkeypatch.delenv(name, raising=False)


@glibc
def test_gaps_are_held_without_memory_and_released() -> None:
    several, few, again, saved, size, held, left = map(int, python(HOLDING, timeout=120).split())
    assert several > 5000 and few < several // 4, "one in eight is left"
    assert again > 3000, "released gaps are in the lists again, those next to each other as one"
    assert saved > size - (80 << 20), "what lies in them goes back to the system, but for pages that a block shares with others"
    assert held > size * 0.7 and left == 0


@glibc
def test_steps_do_not_look_through_what_compiling_left() -> None:
    never = STEPS.replace("= 0.05, -1", "= 1e9, -1")
    compiles = {"JAX_ENABLE_COMPILATION_CACHE": "0", "JAX_NUM_CPU_DEVICES": "1"}
    assert int(python(STEPS, timeout=200, **compiles)) < 4000
    assert int(python(never, timeout=200, **compiles)) > 10_000


class Heap:
    """A C library whose heap ends at 1000, has gaps of two sizes, and gives what is freed away again at once."""

    def __init__(self) -> None:
        self.gaps = {100 << 20: 1, 5000: 3}
        self.freed: list[int] = []
        self.returned: list[tuple[int, int]] = []
        self.asked = 0

        def malloc(size: int) -> int | None:
            self.asked += 1
            fitting = [gap for gap, count in self.gaps.items() if count and gap >= size]
            if fitting:
                self.gaps[min(fitting)] -= 1
                return 900
            return None if self.asked % 2 else 2000

        def madvise(start: int, size: int, advice: int) -> int:
            self.returned.append((start, size))
            return 0

        self.malloc, self.madvise, self.free = malloc, madvise, lambda block: self.freed.append(block)
        self.sbrk, self.mallinfo2 = lambda by: 1000, lambda: heap_gaps._Usage(keepcost=0)


def test_what_is_of_the_end_of_the_heap_is_given_back() -> None:
    heap: Any = Heap()
    gaps = Gaps.of(heap)
    assert gaps is not None and gaps.hold() == 4
    assert not any(heap.gaps.values()) and set(heap.freed) == {2000}
    assert len(heap.returned) == 1, "the gaps of 5,000 bytes need not have a whole page"
    assert gaps.held > 64 << 20
    heap.freed.clear()
    gaps.release()
    assert heap.freed == [900] * 4 and gaps.held == 0


def test_one_gap_in_eight_is_left() -> None:
    heap: Any = Heap()
    heap.gaps = {2000: 80}
    gaps = Gaps.of(heap)
    assert gaps is not None and gaps.hold() == 70
    assert heap.freed.count(900) == 10


def test_a_heap_of_ever_more_gaps_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    heap: Any = Heap()
    heap.gaps = {2000: 1_000_000}
    gaps = Gaps.of(heap)
    monkeypatch.setattr(heap_gaps, "_MOST_BLOCKS", 100)
    assert gaps is not None and 100 <= gaps.hold() < 200


def test_no_gaps_are_held_where_addresses_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    heap: Any = Heap()
    monkeypatch.setattr(heap_gaps, "_counts_addresses", lambda: True)
    assert Gaps.of(heap) is None
    monkeypatch.setattr(heap_gaps, "_counts_addresses", lambda: False)
    monkeypatch.setattr(
        resource, "getrlimit", lambda kind: (1 << 33 if kind == resource.RLIMIT_AS else resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    )
    assert Gaps.of(heap) is None
    monkeypatch.undo()
    del heap.mallinfo2
    assert Gaps.of(heap) is None, "glibc before 2.33"


def test_when_gaps_are_held_and_released(monkeypatch: pytest.MonkeyPatch) -> None:
    heap: Any = Heap()
    gaps = Gaps.of(heap)
    assert gaps is not None
    done: list[str] = []
    monkeypatch.setattr(gaps, "hold", lambda: done.append("hold"))
    monkeypatch.setattr(gaps, "release", lambda: done.append("release"))
    monkeypatch.setattr(freed_memory, "trim", lambda: done.append("trim"))
    monkeypatch.setattr(freed_memory, "_library", Settings())
    monkeypatch.setattr(freed_memory, "_gaps", gaps)
    monkeypatch.setattr(freed_memory, "_own_heaps", False)
    monkeypatch.setattr(freed_memory, "_compiled", 0.0)
    for seconds in (0.4, 0.4):
        freed_memory.trim_after(seconds)
        freed_memory.settle()
    assert done == [], "little was compiled"
    freed_memory.trim_after(0.4)
    freed_memory.settle()
    freed_memory.settle()
    assert done == ["trim", "hold"]
    freed_memory.compiling()
    assert done == ["trim", "hold"], "the gaps are few"
    gaps.held = heap_gaps.MOST + 1
    freed_memory.compiling()
    assert done[2:] == ["release"]
    freed_memory.used_by(freed_memory.MOST + 1)
    assert done[3:] == ["release", "trim"], "large programs have everything again"
    freed_memory.trim_after(5.0)
    freed_memory.settle()
    freed_memory.compiling()
    assert len(done) == 5


class Settings:
    """A C library that takes every setting."""

    def mallopt(self, parameter: int, value: int) -> int:
        return 1
