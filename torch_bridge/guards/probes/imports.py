"""Import statements within functions."""

from __future__ import annotations

import sys

from torch_bridge.guards.conditions import MISSING
from torch_bridge.guards.observer import ACTIVE


def imported(*names: str) -> None:
    """`import a.b`."""
    observer = ACTIVE.observer
    if observer is None or observer.reason:
        return
    for name in names:
        parts = name.split(".")
        for k in range(1, len(parts) + 1):
            full = ".".join(parts[:k])
            observer.conditions.entry(sys.modules, full, sys.modules.get(full, MISSING), f"sys.modules[{full!r}]")


def imported_from(module: str, *names: str) -> None:
    """`from module import names`."""
    observer = ACTIVE.observer
    if observer is None or observer.reason:
        return
    imported(module)
    space = sys.modules.get(module)
    for name in names:
        if name == "*" or space is None:
            observer.refuse(f"it imports * from {module}")
        elif name in vars(space):
            observer.entry(vars(space), vars(space), name, f"{module}.{name}")
        else:
            imported(f"{module}.{name}")
