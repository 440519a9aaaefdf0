"""Gaps of glibc's heap, kept out of the lists in which it looks for free blocks.

Compiling a program leaves 10,000 free blocks and more between what stays. They lie in lists in order of their size, and whenever a step asks for a block glibc
walks such a list, one page of memory after another, while every other thread that wants a block waits: for a ResNet of 0.2 million weights 1.6 ms of a step's
24 ms of CPU time.

So gaps are asked for and held (`Gaps.hold`), all but one in eight. Their pages go back to the system: what is held takes addresses, no memory. A compilation
may have them again (`Gaps.release`).

| step on two cores, in turn | gaps in the lists | held |
|---|---|---|
| U-Net, small (`benchmarks/zoo.py`) | 16.7 ms | 14.3 ms |
| Mixtral, small | 10.6 ms | 9.7 ms |
| Mixtral, medium | 148 ms | 136 ms |
"""

from __future__ import annotations

import ctypes
import mmap
import resource
import threading
from array import array
from itertools import repeat
from typing import Any

MOST = 512 << 20
"""Bytes of gaps that are held while something is compiled; what is more is left to that."""
_LEAST = 1024
"""Bytes from which on glibc keeps blocks of several sizes in one list."""
_LARGEST = 64 << 20
"""Bytes that are asked for at once; a larger gap takes several blocks."""
_BATCH = 16 << 20
"""Bytes that are asked for before it is looked at where they lie."""
_LEFT = 8
"""One of so many gaps is left in the lists, for small blocks that stay: they would be cut off the large ones that each step wants whole."""
_MOST_BLOCKS = 200_000
"""How many gaps are taken at a time, the largest first: 0.4 seconds."""
_DONTNEED = 4


class _Usage(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    ]


class Gaps:
    """The gaps of a C library's heap.

    Attributes:
        held: bytes of those that are held.
    """

    def __init__(self, library: Any):
        self.held = 0
        self._library = library
        self._blocks = array("Q")
        self._turn = 0
        self._lock = threading.Lock()

    @staticmethod
    def of(library: Any) -> Gaps | None:
        """Those of glibc (2.33 or later). None: the library is another, or this process's addresses are limited or counted as memory."""
        if not addresses_are_free():
            return None
        try:
            library.malloc.restype, library.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
            library.free.restype, library.free.argtypes = None, [ctypes.c_void_p]
            library.sbrk.restype, library.sbrk.argtypes = ctypes.c_void_p, [ctypes.c_ssize_t]
            library.madvise.restype, library.madvise.argtypes = ctypes.c_int, [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
            _declare_usage(library)
        except AttributeError:
            return None
        return Gaps(library)

    def hold(self) -> int:
        """Take free blocks of a kilobyte and more out of the lists, but for one of `_LEFT` and for the last one, from which the heap grows; how many.

        2 us a block.
        """
        with self._lock:
            before = len(self._blocks)
            left = array("Q")
            self._take(before + _MOST_BLOCKS, left)
            for block in left:
                self._library.free(block)
            return len(self._blocks) - before

    def _take(self, most: int, left: array[int]) -> None:
        """Take gaps, the largest first, until so many are held or there are no more; some to be left, which are free when all are taken."""
        malloc, free = self._library.malloc, self._library.free
        end = self._library.sbrk(0) - self._library.mallinfo2().keepcost
        size = _LARGEST
        while size >= _LEAST:
            count, more = 1, True
            while more:
                blocks = [block for block in map(malloc, repeat(size, count)) if block is not None]
                gaps = [block for block in blocks if block < end]
                for block in blocks:
                    if block >= end:  # the heap has grown for it, or it is of another thread's heap
                        free(block)
                more = len(gaps) == count
                for block in gaps:
                    self._turn = (self._turn + 1) % _LEFT
                    if not self._turn and size < _BATCH:
                        left.append(block)
                    else:
                        self._keep(block, size)
                if len(self._blocks) >= most:
                    return
                count = min(2 * count, max(1, _BATCH // size))
            size = size * 7 // 8

    def release(self) -> None:
        """Give all that is held back to the lists."""
        with self._lock:
            for block in self._blocks:
                self._library.free(block)
            self._blocks = array("Q")
            self.held = 0

    def _keep(self, block: int, size: int) -> None:
        self._blocks.append(block)
        self.held += size
        page = mmap.PAGESIZE
        if size >= 2 * page:  # whole pages within it
            start = -(-block // page) * page
            self._library.madvise(start, (block + size) // page * page - start, _DONTNEED)


def allocated(library: Any) -> int:
    """Bytes that the process has from a C library's heaps now; 0 if it is not glibc 2.33 or later."""
    try:
        _declare_usage(library)
    except AttributeError:
        return 0
    usage = library.mallinfo2()
    return int(usage.uordblks + usage.hblkhd)


def _declare_usage(library: Any) -> None:
    library.mallinfo2.restype, library.mallinfo2.argtypes = _Usage, []


def addresses_are_free() -> bool:
    """Whether addresses that hold no memory cost nothing: no limit of this process or of the system counts them."""
    limited = any(resource.getrlimit(kind)[0] != resource.RLIM_INFINITY for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA))
    return not limited and not _counts_addresses()


def _counts_addresses() -> bool:
    """Whether the system counts addresses as memory (Linux's strict accounting)."""
    try:
        with open("/proc/sys/vm/overcommit_memory") as setting:
            return setting.read().strip() == "2"
    except OSError:
        return False
