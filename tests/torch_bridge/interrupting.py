"""KeyboardInterrupt before a line of Python code, wherever Ctrl-C may be raised."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

from torch_bridge.ir.segment import LOCK
from torch_bridge.runtime import interrupts


class BeforeLine:
    """A trace function that raises it before the n-th of these lines, counted from 0."""

    def __init__(self, n: int):
        self.left = n
        self.raised = False
        self.at = ""

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        if event == "line" and signal.getsignal(signal.SIGINT) is interrupts.on_interrupt and interrupts._may_stop(frame):
            if not self.left:
                self.raised = True
                self.at = f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
                sys.settrace(None)
                raise KeyboardInterrupt
            self.left -= 1
        return self

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """It is raised in functions that the block calls, and goes no further."""
        outer = sys.gettrace()
        sys.settrace(self)
        try:
            yield
        except KeyboardInterrupt:
            assert self.raised
        finally:
            sys.settrace(outer)
            assert not LOCK._is_owned(), f"raised at {self.at}, it leaves a lock locked"  # type: ignore[attr-defined]
