"""Whether `sys.exit` with an error ends this process: Python tells `atexit` functions nothing of it."""

from __future__ import annotations

import dis
import functools
import sys
from types import TracebackType
from typing import NamedTuple

_last: SystemExit | None = None
_ENDS = ("RETURN_VALUE", "RETURN_CONST")


@functools.cache
def install() -> None:
    """Note from now on what `sys.exit` is called with."""
    original = sys.exit

    @functools.wraps(original)
    def leave(status: object = None, /) -> None:
        global _last
        _last = SystemExit() if status is None else SystemExit(*status) if isinstance(status, tuple) else SystemExit(status)
        raise _last

    sys.exit = leave  # type: ignore[assignment]


class Failure(NamedTuple):
    """How a process ends: in words, and its status."""

    words: str
    status: int


def failure() -> Failure | None:
    """Asked at the end of the process: how `sys.exit` ended it with an error; None if it did not."""
    code = None if _last is None else _last.code
    if _last is None or code is None or code == 0 or not _left(_last.__traceback__):
        return None
    text = repr(code)
    return Failure(f"sys.exit({text if len(text) <= 200 else text[:200] + '...'})", code & 0xFF if isinstance(code, int) else 1)


def _left(trace: TracebackType | None) -> bool:
    """Whether an exception was caught nowhere: no function that it came through went on to a `return`. (Python 3.11 notes only functions that handle one.)"""
    if trace is None:
        return True
    at = trace.tb_frame.f_lasti
    return not any(i.offset == at and i.opname in _ENDS for i in dis.get_instructions(trace.tb_frame.f_code))
