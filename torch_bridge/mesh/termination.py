"""SIGTERM in one of several processes: the process ends at once, wherever it is, and says so in one line.

Python calls a handler between two of its own instructions, and a rank may wait in a collective for minutes. So the signal's number is also written to a pipe
(`signal.set_wakeup_fd`), and a thread that reads the pipe ends the process as SIGTERM by default does. A handler of the script (Lightning, transformers) is
called as ever, and what it does then counts: nothing here ends such a process.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType

LAST_WORD: Callable[[str], None] | None = None
"""Tells the other processes what ends this one."""
_seen = False
_name = ""
_ending = threading.Lock()
_masks = threading.local()
_pipe: tuple[int, int] | None = None
"""Where the numbers of signals are read, and the file descriptor (or -1) of whoever had them before."""
_reading = threading.Lock()


def seen() -> bool:
    """Whether this process got a SIGTERM. It reads the pipe itself: the thread may not have had its turn yet when the script's handler ends the process."""
    _read()
    return _seen


def install(name: str) -> None:
    """Watch for SIGTERM. `name` says in the message which process ends. Off the main thread, where Python sets no handlers, everything stays as it is."""
    global _name, _pipe
    if threading.current_thread() is not threading.main_thread():
        return
    _name = name
    if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
        signal.signal(signal.SIGTERM, on_terminate)
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    os.set_blocking(writing, False)
    _pipe = reading, signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    os.register_at_fork(before=_before_fork, after_in_parent=_in_parent, after_in_child=_in_child)
    threading.Thread(target=_watch, args=(reading,), daemon=True, name="nxd_jax SIGTERM").start()


def on_terminate(number: int, frame: FrameType | None) -> None:
    """End the process. Called by the handler that replaced this one, it does nothing, as the default would that it stands for."""
    if _is_ours():
        _end()


def _watch(reading: int) -> None:
    """Wait for signals, and end the process at a SIGTERM that no handler of the script takes."""
    arriving = select.poll()
    arriving.register(reading, select.POLLIN)
    while True:
        arriving.poll()  # takes nothing out: what `seen` reads first is not lost
        if _read() and _is_ours():
            _end()


def _read() -> bool:
    """Take the numbers of signals that have arrived, and hand them on to whoever had the pipe before. Whether SIGTERM is among them."""
    global _seen
    with _reading:
        if _pipe is None:
            return False
        reading, before = _pipe
        try:
            numbers = os.read(reading, 64)
        except BlockingIOError:  # the other thread has read them
            return False
        if before >= 0:
            os.write(before, numbers)
        _seen = _seen or signal.SIGTERM in numbers
        return signal.SIGTERM in numbers


def _is_ours() -> bool:
    return signal.getsignal(signal.SIGTERM) is on_terminate


def _end() -> None:
    """Say why, and die of the signal, so that the parent sees what it sees of other programs. The first of the two threads does it."""
    if not _ending.acquire(blocking=False):
        return
    os.write(2, f"nxd_jax: {_name} (pid {os.getpid()}) ended by SIGTERM\n".encode())
    if LAST_WORD is not None:
        LAST_WORD("ended by SIGTERM")
    libc = ctypes.CDLL(None)
    libc.signal.restype, libc.signal.argtypes = ctypes.c_void_p, (ctypes.c_int, ctypes.c_void_p)
    libc.signal(signal.SIGTERM, None)  # the default; Python's own function works in the main thread only
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(1)
    os._exit(128 + signal.SIGTERM)  # the signal is blocked


def _before_fork() -> None:
    """Until the child has done `_in_child`, a SIGTERM for it waits: it would be lost, or count as its parent's."""
    _masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def _in_parent() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _masks.before)


def _in_child() -> None:
    """A fork (a worker of a DataLoader) has no such thread, and must neither write to its parent's pipe nor read it."""
    global _pipe, _reading
    _pipe, _reading = None, threading.Lock()
    try:
        signal.set_wakeup_fd(-1)
        if _is_ours():
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
    except ValueError:  # not in a main thread
        pass
    signal.pthread_sigmask(signal.SIG_SETMASK, _masks.before)
