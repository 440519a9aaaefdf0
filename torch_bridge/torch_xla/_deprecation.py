"""Names that upstream deprecated warn as upstream does, but once per process."""

from __future__ import annotations

import warnings

_WARNED: set[str] = set()


def warn_once(message: str) -> None:
    """A DeprecationWarning at the line that called the caller."""
    if message not in _WARNED:
        _WARNED.add(message)
        warnings.warn(message, DeprecationWarning, stacklevel=3)
