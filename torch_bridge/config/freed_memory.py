"""Freed memory that the process keeps, as a step's temporaries are wanted again in the next one.

glibc gives large blocks back to the system as soon as they are free, and the kernel clears every page when they are asked for again: 22,000 pages in each
step of a Llama of 8 layers, a sixth of its CPU time. So what is freed is kept (`keep`), in one of two ways that glibc must know before JAX's threads start:

| | a heap for each thread | one heap for all threads |
|---|---|---|
| a process that has allocated | up to `HEAPS_UP_TO` | more: a real model is there |
| compiled programs | are not kept on disk, or not run | are kept and run: few are compiled |
| threads that compile | each has its own | wait for each other: XLA takes 1.2x as long on 2 threads, 1.65x on 16 |
| threads that ran a program | keep its temporaries, until they are idle (`idle_heaps`) | have none |
| blocks above 64 MiB | come from the system each time, as without this | are kept |
| what compiling leaves | lies in the heaps of threads that have ended | lies where steps look for memory (`heap_gaps`) |

XLA puts all temporaries of a program into one block. It is told to make several, which are kept (`largest_block`); a tensor of more has its own. Not where an
executable is written to disk or copied to other devices (`compiler.xla_options`).

What compiling a program and its first execution leave goes back to the system (`trim_after`, `settle`). Where programs take more than `MOST` bytes, the
clearing costs less than the gaps, and all is given back (`give_back`).

`GLIBC_TUNABLES=glibc.malloc.hugetlb=1` in the environment, which glibc reads when a process starts, saves most of the clearing for blocks of any size. Where
it, another setting of glibc's or another allocator is found, nothing is done here.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from typing import Any

from torch_bridge.config import heap_gaps
from torch_bridge.config.heap_gaps import Gaps
from torch_bridge.config.idle_heaps import IdleHeaps

MOST = 4 << 30
"""Bytes of a program's arguments up to which freed memory is kept."""
HEAPS_UP_TO = 384 << 20
"""Bytes that a process has allocated when JAX starts up to which each thread gets a heap of its own. torch and transformers take 150 MB."""
BLOCK = 48 << 20
"""Bytes of a block that such a heap, of 64 MiB, has room for besides others."""
_LARGEST = 1 << 30
"""Bytes of a block that the system gives and gets back in any case, glibc's threshold: half of it leaves room for what lies around a block."""
_PAD = 256 << 20
"""Bytes by which heaps grow, of addresses: from twice a thread's heap on, glibc does not take an empty one apart."""
_LONG, _LONG_WITH_HEAPS = 1.0, 0.3
"""Seconds that compiling takes from which on it leaves so much freed memory that it pays to spend 0.1 seconds on giving that back, or 0.01 seconds where
steps find nothing of it."""
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -2, -3, -8
"""glibc's numbers of what `mallopt` sets."""
_OWN = ("MALLOC_ARENA_MAX", "MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_")

_library: Any = None
"""The C library, while it keeps memory."""
_gaps: Gaps | None = None
"""Its heap's gaps, while it keeps memory in one heap."""
_own_heaps = False
"""Whether each thread has a heap of its own."""
_idle: IdleHeaps | None = None
"""What such heaps keep, while they keep memory."""
_compiled = 0.0
"""Seconds that programs took to compile since gaps were held."""


def keep(one_heap: bool = False) -> bool:
    """Keep it from now on; JAX's threads must not have started. False, and nothing done, if the user has said how memory is allocated (glibc's variables,
    another allocator in LD_PRELOAD), or the C library is not glibc.

    one_heap: all threads share a heap, however little the process has allocated.
    """
    global _library, _gaps, _own_heaps, _idle
    if any(name in os.environ for name in _OWN) or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return False
    if "malloc" in os.environ.get("LD_PRELOAD", ""):
        return False
    try:
        library = ctypes.CDLL(None)
        library.gnu_get_libc_version  # noqa: B018  # AttributeError elsewhere
        mallopt, _ = library.mallopt, library.malloc_trim
    except (AttributeError, OSError, TypeError):
        return False
    heaps = not one_heap and heap_gaps.addresses_are_free() and heap_gaps.allocated(library) <= HEAPS_UP_TO
    if not all(
        [
            mallopt(*(_TOP_PAD, _PAD) if heaps else (_ARENA_MAX, 1)),
            mallopt(_MMAP_THRESHOLD, _LARGEST),
            mallopt(_TRIM_THRESHOLD, 2 * _LARGEST),
        ]
    ):
        return False
    _library, _gaps, _own_heaps = library, None if heaps else Gaps.of(library), heaps
    _idle = IdleHeaps(trim) if heaps else None
    return True


def largest_block() -> int | None:
    """Bytes that blocks of temporaries are to have at most, so that they are kept. None: none are."""
    if _library is None:
        return None
    return BLOCK if _own_heaps else _LARGEST // 2


def used_by(arguments: int) -> None:
    """A program is compiled that takes arguments of so many bytes: if they are many, freed memory is given back from now on."""
    if arguments > MOST and _library is not None:
        give_back()


def compiling() -> None:
    """A program is compiled from now on: it may have the gaps that are held, if they are many."""
    if _gaps is not None and _gaps.held > heap_gaps.MOST:
        _gaps.release()


def trim_after(compilation: float) -> None:
    """What compiling a program, which took so many seconds, has left goes back to the system, if that takes little of that time.

    Later steps keep what they free.
    """
    global _compiled
    _compiled += compilation
    if compilation >= _long() and _library is not None:
        trim()


def _long() -> float:
    return _LONG_WITH_HEAPS if _own_heaps else _LONG


def settle() -> None:
    """A program has run once: what is free by now, after compiling it and others, goes back to the system, and the gaps out of the lists in which steps look
    for memory, if compiling took much longer than that."""
    global _compiled
    if _compiled < _long() or _library is None:
        return
    _compiled = 0.0
    trim()
    if _gaps is not None:
        _gaps.hold()


def ran() -> None:
    """A program runs that has run before: what heaps keep, and it may not need, goes back now and then (`idle_heaps`)."""
    if _idle is not None:
        _idle.ran()


def trim() -> None:
    """Give all freed memory back to the system now (about 10 ms): blocks of ever other sizes leave gaps that the next ones do not fit in."""
    if _idle is not None:
        _idle.trimmed()
    with contextlib.suppress(AttributeError, OSError, TypeError):  # not glibc
        (_library or ctypes.CDLL(None)).malloc_trim(ctypes.c_size_t(0))


def give_back() -> None:
    """Give freed memory to the system, now and later."""
    global _library, _gaps, _idle
    _idle = None
    library, _library = _library, None
    gaps, _gaps = _gaps, None
    if gaps is not None:
        gaps.release()
    if library is not None:
        library.mallopt(_MMAP_THRESHOLD, 128 << 10)
        library.mallopt(_TRIM_THRESHOLD, 128 << 10)
        library.mallopt(_TOP_PAD, 128 << 10)
        trim()
