"""A progress bar for long work. (Not part of NxD.)"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

from torch_bridge.mesh import world


class Items(Protocol):
    """What can be counted and gone through."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Any]: ...


def bar(items: Items, what: str, least: int) -> Iterable[Any]:
    """The items; with a bar named `what` if there are at least `least`, on a terminal, in the process of rank 0, and if tqdm is installed."""
    if len(items) < least or world.first() or not sys.stderr.isatty():
        return items
    try:
        from tqdm import tqdm
    except ImportError:
        return items
    return tqdm(items, desc=what, leave=False)
