"""How this process ends: whether `sys.exit` with an error does it, of which Python tells `atexit` functions nothing, and how they make its status an error."""

from __future__ import annotations

import dis
import functools
import sys
from types import TracebackType
from typing import Any, NamedTuple

_last: SystemExit | None = None
_failed: Failure | None = None
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
    """Asked at the end of the process: how `sys.exit` or `fail` ended it with an error; None if neither did."""
    if _failed is not None:
        return _failed
    code = None if _last is None else _last.code
    if _last is None or code is None or code == 0 or not _left(_last.__traceback__):
        return None
    text = repr(code)
    return Failure(f"sys.exit({text if len(text) <= 200 else text[:200] + '...'})", code & 0xFF if isinstance(code, int) else 1)


FAILED = 120
"""The status of a process that ends well, and fails to write out its streams when it does: Python's own for what goes wrong so late."""


def fail(words: str) -> None:
    """Have the process end with status FAILED. For functions that run at its end, from which Python takes no status; all others still run.

    words: why, for the other processes.
    """
    global _failed
    _failed = Failure(words, FAILED)
    if not isinstance(sys.stderr, _Unwritten):
        sys.stderr = _Unwritten(sys.stderr)


class _Unwritten:
    """A stream that cannot be written out at the very end, after the `atexit` functions."""

    def __init__(self, stream: Any):
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def flush(self) -> None:
        if self._stream is not None:
            self._stream.flush()
        if sys.is_finalizing():
            raise OSError("the process ends with an error")


def _left(trace: TracebackType | None) -> bool:
    """Whether an exception was caught nowhere: no function that it came through went on to a `return`. (Python 3.11 notes only functions that handle one.)"""
    if trace is None:
        return True
    at = trace.tb_frame.f_lasti
    return not any(i.offset == at and i.opname in _ENDS for i in dis.get_instructions(trace.tb_frame.f_code))
