"""Ctrl-C at moments that can bear it.

`deferred` holds it back while something must not stop half-way. `on_interrupt` takes the place of Python's own handler once the device is in use:
torch asks its device guard for a type in the middle of C++ that must not fail, pybind11 gives Python a chance to deliver signals there, and a
KeyboardInterrupt would end the process. Where Python is between two of its own instructions it is raised at once; elsewhere before the next line of
Python code (unless a debugger has the trace function). Meanwhile the signal is sent again, until the process has evidently been waiting in one call
(`time.sleep`, input), which may be interrupted as always.
"""

from __future__ import annotations

import _signal  # without what `signal` puts around it: looking each handler up in an enumeration takes 15 us for every program that runs
import _thread
import dis
import os
import signal
import sys
import threading
import time
from types import FrameType
from typing import Any

WAITING = 0.05
"""Seconds at one instruction after which the process counts as waiting in a call."""

PATIENCE = 2.0
"""Seconds until a KeyboardInterrupt is raised wherever the process is."""

_PAUSE = 0.001
_BETWEEN = {code for name, code in dis.opmap.items() if name == "RESUME" or "JUMP_BACKWARD" in name}
"""Instructions that look for signals and call nothing."""

_FRAGILE = {"__enter__", "__exit__", "__del__", "graph_break", "_xla_gc_callback"}
"""Functions that enter or leave a state (`graph_break` frames an optimizer's change of grad mode); destructors and JAX's, in which Python drops exceptions."""

_OURS = (("ir", "segment.py"), ("mesh", "stacked_arrays.py"), ("passes", "place_nodes.py"))
_FRAGILE_FILES = ("grad_mode.py", "weakref.py", "_weakrefset.py", *(os.path.join("torch_bridge", *file) for file in _OURS))
"""torch's grad mode; callbacks of weak references, in which Python drops exceptions; and the lists of a segment, which must agree with each other."""

_CALLBACKS = {"ExactWeakKeyDictionary.__setitem__.<locals>.<lambda>"}
"""More callbacks of weak references: torch's compiler has these."""

_since: float | None = None
_on_its_way = False
_deciding = threading.Lock()
"""Held while one of the two threads looks at `_since` and `_on_its_way` and acts on it: a signal must not arrive after its own KeyboardInterrupt."""

_at: tuple[Any, float] = (None, 0.0)


def pending() -> bool:
    """Whether a Ctrl-C has been seen that is not raised yet."""
    return _since is not None


def install() -> None:
    """Replace Python's own SIGINT handler (no other) by ours, if this is the main thread."""
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, on_interrupt)


def on_interrupt(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt now, or a little later."""
    global _since, _on_its_way
    _on_its_way = False
    now = time.monotonic()
    if _since is None:
        _since = now
    if frame is None or _between_instructions(frame) or _is_waiting(frame, now) or now - _since > PATIENCE:
        _raise()
    if frame is not None and sys.gettrace() is None:
        _watch(frame)
    _thread.start_new_thread(_send_again, ())


def _raise() -> None:
    global _since, _at
    _since, _at = None, (None, 0.0)
    if sys.gettrace() is _before_line:
        sys.settrace(None)
    raise KeyboardInterrupt


def _between_instructions(frame: FrameType) -> bool:
    """Whether nothing but Python code is interrupted, and none that has to restore something (torch's grad mode, for one)."""
    return frame.f_code.co_code[frame.f_lasti] in _BETWEEN and not _is_fragile(frame)


def _may_stop(frame: FrameType) -> bool:
    """Whether an exception before this line leaves nothing behind. A `with` statement whose block has ended comes back to its own line to call `__exit__`:
    raised there, an exception would leave a lock locked."""
    code, at = frame.f_code.co_code, frame.f_lasti
    if code[at] == _SWAP:  # the value of a `return` in the block stays below
        at += 2
    leaves = code[at] == _LOAD_CONST and code[at : at + 6] == code[at : at + 2] * 3  # three times None, for __exit__
    return not leaves and code[at] not in (_HANDLES, _NOTHING) and not _is_fragile(frame)


_LOAD_CONST, _HANDLES, _SWAP, _NOTHING = (dis.opmap[name] for name in ("LOAD_CONST", "PUSH_EXC_INFO", "SWAP", "NOP"))
"""A `try` of its own line is a NOP that belongs to no block: raised there, an exception would pass by the `with` around it."""


def _is_fragile(frame: FrameType) -> bool:
    at: FrameType | None = frame
    while at is not None:
        code = at.f_code
        if code.co_name in _FRAGILE or code.co_filename.endswith(_FRAGILE_FILES) or code.co_qualname in _CALLBACKS:
            return True
        at = at.f_back
    return False


def _watch(frame: FrameType) -> None:
    """Have `_before_line` called before each line of this frame, of those that called it, and of those it calls."""
    at: FrameType | None = frame
    while at is not None:
        at.f_trace = _before_line
        at = at.f_back
    sys.settrace(_before_line)


def _before_line(frame: FrameType, event: str, _: Any) -> Any:
    if _since is None:
        sys.settrace(None)
        return None
    if event == "line" and signal.getsignal(signal.SIGINT) is on_interrupt and _may_stop(frame) and _deciding.acquire(blocking=False):
        try:
            if not _on_its_way:
                _raise()
        finally:
            _deciding.release()
    return _before_line


def _is_waiting(frame: FrameType, now: float) -> bool:
    global _at
    place = id(frame), frame.f_lasti
    if _at[0] != place:
        _at = place, now
    return now - _at[1] > WAITING


def _send_again() -> None:
    global _on_its_way
    time.sleep(_PAUSE)
    with _deciding:
        if _since is None:
            return
        _on_its_way = True
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)  # type: ignore[arg-type]


class Deferred:
    """The interrupts that arrived meanwhile."""

    __slots__ = ("caught",)

    def __init__(self) -> None:
        self.caught: list[Any] = []

    def catch(self, *args: Any) -> None:
        """A signal handler."""
        self.caught.append(args)


class deferred:
    """Keep Ctrl-C until the block ends, then deliver it. Gives None (and does nothing) off the main thread, where Python delivers no signals."""

    __slots__ = ("_previous", "_state")

    def __enter__(self) -> Deferred | None:
        self._previous = _signal.getsignal(signal.SIGINT) if threading.current_thread() is threading.main_thread() else None
        self._state: Deferred | None = None
        if callable(self._previous):
            self._state = Deferred()
            _signal.signal(signal.SIGINT, self._state.catch)
        return self._state

    def __exit__(self, *exception: object) -> None:
        if self._state is None:
            return
        previous, caught = self._previous, self._state.caught
        ours = previous in (signal.default_int_handler, on_interrupt)  # a notebook sets Python's own before every cell
        _signal.signal(signal.SIGINT, on_interrupt if ours else previous)
        if caught:
            _deliver(signal.default_int_handler if ours else previous, caught[-1])


def _deliver(handler: Any, args: Any) -> None:
    global _since, _on_its_way
    _since, _on_its_way = None, False
    handler(*args)
