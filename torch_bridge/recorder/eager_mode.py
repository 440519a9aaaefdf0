"""Eager mode: every op runs by itself, at once (`torch_xla.experimental.eager_mode`). It computes what recording a whole step computes, slower."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

_enabled = False
WHEN_CHANGED: list[Callable[[], None]] = []
"""Called after it was switched on or off."""


def enabled() -> bool:
    """Whether ops run by themselves now."""
    return _enabled


def enable(on: bool) -> None:
    """Switch it on or off, for all threads. Does not start JAX."""
    global _enabled
    _enabled = bool(on)
    for changed in WHEN_CHANGED:
        changed()


@contextmanager
def mode(on: bool) -> Iterator[None]:
    """On or off for the duration."""
    before = _enabled
    if on is not before:
        enable(on)
    try:
        yield
    finally:
        if on is not before:
            enable(before)
