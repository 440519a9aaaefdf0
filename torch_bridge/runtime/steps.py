"""The end of a training step: run what was recorded, then the functions that scripts left to be called with its results."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from torch.utils._pytree import tree_map

from torch_bridge import metrics
from torch_bridge.telemetry import activity

_lock = threading.Lock()
_background: ThreadPoolExecutor | None = None
_running: deque[Future[Any]] = deque()


def add_closure(fn: Callable[..., Any], args: tuple[Any, ...] = (), run_async: bool = False) -> None:
    """Call `fn(*args)` at the end of this step, when its tensors have values; in the order added, or on a thread beside the next step if
    `run_async`.
    """
    from torch_bridge.runtime import session

    with _lock:
        session.current().closures.append((fn, tuple(args), run_async))


def mark(wait: bool = False) -> None:
    """End the step: run everything recorded, then its closures. `wait` blocks until the device is done.

    Raises what an earlier asynchronous closure raised.
    """
    from torch_bridge.runtime import executor, session

    metrics.count("MarkStep")
    executor.sync(wait=wait)
    ran = activity.ACTIVITY.step()
    own = session.current()
    for observer in reversed(own.observers):  # a profile that began within a watch notes the step before the watch ends the script
        observer.step_ended(ran)
    _raise_failed()
    with _lock:
        closures, own.closures = own.closures, []
    for fn, args, run_async in closures:
        if run_async:
            _start(fn, args)
        else:
            fn(*args)


def wait_closures() -> None:
    """Block until every asynchronous closure has run."""
    while _running:
        _running.popleft().result()


def _plain(x: Any) -> Any:
    return x


_snapshot: Callable[[Any], Any] = _plain


def _start(fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
    global _background
    from torch_bridge.runtime import session

    if _background is None:
        _background = ThreadPoolExecutor(1, thread_name_prefix="xla-step-closures")
    _running.append(_background.submit(session.bound(fn), *tree_map(_snapshot, args)))


def _raise_failed() -> None:
    while _running and _running[0].done():
        _running.popleft().result()


def snapshot_with(snapshot: Callable[[Any], Any]) -> None:
    """Say how an xla tensor is kept with today's value, whatever the next step writes into the original (`copies.snapshot`)."""
    global _snapshot
    _snapshot = snapshot
