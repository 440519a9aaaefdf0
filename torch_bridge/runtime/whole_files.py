"""Files that get their names when they are whole, and the system's reason where one cannot be written."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from typing import Any

import torch

_PROBE = 1 << 16
"""Bytes whose writing shows whether there is room: more than what a block of a file that is being written has left."""


def save(data: Any, place: Any) -> None:
    """`torch.save` to a path or an open file. At a path, what was there before stays until the new file is whole.

    Raises OSError with the system's reason (no space left on device) where torch says only that a stream failed; nothing half-written is left then.
    """
    if not isinstance(place, (str, os.PathLike)) or _is_special(place):
        torch.save(data, place)
        return
    target = os.path.realpath(place)
    unfinished = f"{target}.unfinished"
    try:
        with _explained(unfinished):
            torch.save(data, unfinished)
        if os.path.exists(target):
            os.chmod(unfinished, stat.S_IMODE(os.stat(target).st_mode))
        os.replace(unfinished, target)
    finally:
        with contextlib.suppress(OSError):
            os.unlink(unfinished)


def _is_special(path: str | os.PathLike[str]) -> bool:
    """Whether there is something that is no plain file, such as a pipe."""
    return os.path.exists(path) and not os.path.isfile(path)


@contextlib.contextmanager
def _explained(path: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        reason = _reason(path)
        if reason is None:
            raise
        raise OSError(reason.errno, reason.strerror, path) from error


def _reason(path: str) -> OSError | None:
    """Why nothing more can be written to a file; None if it can."""
    try:
        with open(path, "ab", buffering=0) as file:
            written = file.write(bytes(_PROBE))
            os.fsync(file.fileno())
            if written < _PROBE:
                file.write(bytes(_PROBE))
    except OSError as error:
        return error
    return None
