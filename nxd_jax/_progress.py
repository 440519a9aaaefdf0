"""A progress bar for long work. (Not part of NxD.)"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any

from torch_bridge.mesh import world


def bar(items: Sequence[Any], what: str, least: int) -> Iterable[Any]:
    """The items; with a bar named `what` if there are at least `least`, on a terminal, in the process of rank 0, and if tqdm is installed."""
    if len(items) < least or world.first() or not sys.stderr.isatty():
        return items
    try:
        from tqdm import tqdm
    except ImportError:
        return items
    return tqdm(items, desc=what, leave=False)
