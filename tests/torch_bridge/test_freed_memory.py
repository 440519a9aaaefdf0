"""Freed memory is kept for the next step, unless the user has said otherwise or programs are large."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch

from tests.torch_bridge.devices import python
from torch_bridge.config import freed_memory, heap_gaps

USERS = [*freed_memory._OWN, "GLIBC_TUNABLES", "LD_PRELOAD"]
"""Variables with which users say how memory is allocated."""
FAULTS = """
import resource, time
import torch, torch_xla, torch_xla.core.xla_model as xm
from torch_bridge.config import freed_memory
freed_memory.MOST, freed_memory.HEAPS_UP_TO = NUMBERS
x, w = torch.ones(4096, 256, device="xla"), [torch.ones(256, WIDTH, device="xla") for _ in range(COUNT)]
def step():
    s = torch.stack([(torch.sin(x @ v) @ v.t()).sum() for v in w]).sum()
    xm.mark_step()
    s.item()
    time.sleep(0.05)  # temporaries are freed a little after results are there
for _ in range(6): step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(6): step()
print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) // 6)
"""


def faults(heaps: bool, width: int, most: int = freed_memory.MOST, **variables: str) -> int:
    """Page faults of a step whose temporaries have 24,576 pages (96 MiB) for 6,144 columns. heaps: whether each thread has a heap, or all one."""
    numbers = f"({most}, {1 << 40 if heaps else -1})"
    script = FAULTS.replace("NUMBERS", numbers).replace("WIDTH", str(width)).replace("COUNT", str(3 if heaps else 1))
    return int(python(script, timeout=200, **variables))


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "gnu_get_libc_version"), reason="the C library is not glibc")
def test_steps_do_not_ask_for_their_memory_again(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [*USERS, "JAX_COMPILATION_CACHE_DIR"]:  # where programs are kept on disk, all threads share a heap
        monkeypatch.delenv(name, raising=False)
    assert faults(True, 2560) < 10_000, "blocks of 40 MiB"
    assert faults(True, 2560, NXD_JAX_KEEP_FREED_MEMORY="0") > 20_000
    assert faults(False, 18432) < 10_000, "one block of 288 MiB"
    tries = (
        faults(False, 6144, most=1 << 20) for _ in range(3)
    )  # now and then the system has pages at hand: 770 faults in one run of five
    assert any(found > 20_000 for found in tries), "programs that take more than a megabyte"


class Library:
    """A C library that notes what is set."""

    def __init__(self, answer: int = 1):
        self.set: list[tuple[int, int]] = []
        self.trimmed = 0

        def mallopt(parameter: int, value: int) -> int:
            self.set.append((parameter, value))
            return answer

        def malloc_trim(pad: int) -> int:
            self.trimmed += 1
            return 1

        self.gnu_get_libc_version = object()
        self.mallopt, self.malloc_trim = mallopt, malloc_trim


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    made = Library()
    for name in USERS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: made)
    for name in ("_library", "_gaps"):
        monkeypatch.setattr(freed_memory, name, None)
    monkeypatch.setattr(freed_memory, "_own_heaps", False)
    return made


def test_it_is_given_back_once_programs_are_large(library: Library) -> None:
    assert freed_memory.keep() and len(library.set) == 3
    freed_memory.used_by(freed_memory.MOST)
    assert library.trimmed == 0
    freed_memory.used_by(freed_memory.MOST + 1)
    freed_memory.used_by(freed_memory.MOST + 1)
    assert library.trimmed == 1 and len(library.set) == 6
    assert freed_memory.largest_block() is None


@pytest.mark.parametrize(("allocated", "addresses", "heaps"), [(100 << 20, True, True), (1 << 30, True, False), (100 << 20, False, False)])
def test_threads_have_heaps_where_little_is_allocated(
    allocated: int, addresses: bool, heaps: bool, library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heap_gaps, "allocated", lambda of: allocated)
    monkeypatch.setattr(heap_gaps, "addresses_are_free", lambda: addresses)
    assert freed_memory.keep()
    assert ((freed_memory._ARENA_MAX, 1) not in library.set) is heaps
    assert freed_memory.largest_block() == (48 << 20 if heaps else 512 << 20)


def test_one_heap_where_programs_are_kept_on_disk(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heap_gaps, "allocated", lambda of: 100 << 20)
    assert freed_memory.keep(one_heap=True) and (freed_memory._ARENA_MAX, 1) in library.set


def test_what_a_process_has_allocated() -> None:
    library = ctypes.CDLL(None)
    before = heap_gaps.allocated(library)
    held = bytearray(64 << 20)
    assert (heap_gaps.allocated(library) - before >> 20) in (63, 64, 65) or not hasattr(library, "mallinfo2")
    del held


def test_what_compiling_leaves_is_given_back(library: Library) -> None:
    freed_memory.trim_after(60.0)
    assert library.trimmed == 0, "nothing is kept yet"
    assert freed_memory.keep()
    freed_memory.trim_after(0.2)
    assert library.trimmed == 0, "little was compiled"
    freed_memory.trim_after(2.0)
    assert library.trimmed == 1 and len(library.set) == 3, "steps go on keeping what they free"


def test_a_program_gives_back_after_compiling_and_after_its_first_execution(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    assert freed_memory.keep()
    for name in ("_LONG", "_LONG_WITH_HEAPS"):
        monkeypatch.setattr(freed_memory, name, 0.0)
    trimmed = []
    for k in range(4):
        (torch.full((3,), k + 2.0, device="xla") * 1.25 + 0.375).cpu()
        trimmed.append(library.trimmed)
    assert trimmed == [1, 2, 2, 2]


@pytest.mark.parametrize(
    ("name", "value"),
    [("MALLOC_ARENA_MAX", "4"), ("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1"), ("LD_PRELOAD", "/usr/lib/libtcmalloc.so.4")],
)
def test_the_users_own_settings_stay(name: str, value: str, library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    assert not freed_memory.keep() and not library.set
    freed_memory.used_by(freed_memory.MOST + 1)
    assert library.trimmed == 0


def test_other_libraries(library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    del library.gnu_get_libc_version
    assert not freed_memory.keep() and not library.set
    refusing = Library(0)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: refusing)
    assert not freed_memory.keep()
