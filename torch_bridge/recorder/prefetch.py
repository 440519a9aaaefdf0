"""Reading ahead: a thread reads the user's data loader, others move its batches to the device, in order.

The first batch is read on the caller's thread, so that a loader draws its shuffle from torch's random state exactly where it would without
us, and an error in a dataset's first item has a plain traceback. Whatever a thread raises arrives at the consumer in its place. Leaving the
loop early (`break`, an exception) stops the threads.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from torch_bridge import nested
from torch_bridge.runtime import backend

_THREAD_NAME = "xla-loader"
_JOIN_SECONDS = 5.0


class _End:
    """The loader is exhausted, or raised `error`."""

    def __init__(self, error: BaseException | None = None):
        self.error = error


class Channel:
    """A bounded queue that either side can close."""

    def __init__(self, capacity: int):
        self._items: deque[Any] = deque()
        self._capacity = capacity
        self._changed = threading.Condition()
        self._closed = False

    def put(self, item: object) -> bool:
        """Append, waiting for room; False if the channel was closed."""
        with self._changed:
            while len(self._items) >= self._capacity and not self._closed:
                self._changed.wait()
            if self._closed:
                return False
            self._items.append(item)
            self._changed.notify_all()
            return True

    def get(self) -> Any:
        """The oldest item, waiting for one; an `_End` if the channel was closed."""
        with self._changed:
            while not self._items and not self._closed:
                self._changed.wait()
            if self._closed:
                return _End()
            item = self._items.popleft()
            self._changed.notify_all()
            return item

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._items.clear()
            self._changed.notify_all()


def check_sizes(host_ahead: int, device_ahead: int, movers: int) -> None:
    """Raise ValueError, in the names scripts use, for numbers that are not positive."""
    for name, count in (
        ("loader_prefetch_size", host_ahead),
        ("device_prefetch_size", device_ahead),
        ("host_to_device_transfer_threads", movers),
    ):
        if type(count) is not int or count < 1:
            raise ValueError(f"{name} must be a positive number, got {count!r}")


class Prefetcher(Iterator[Any]):
    """Iterates over `loader`, each batch passed through `move` on another thread.

    host_ahead, device_ahead: batches to read ahead, and to move ahead. movers: threads that move. Closed when exhausted, closed or garbage
    collected.
    """

    def __init__(self, loader: Iterable[Any], move: Callable[[Any], Any], host_ahead: int = 16, device_ahead: int = 8, movers: int = 1):
        check_sizes(host_ahead, device_ahead, movers)
        self._loader: Iterable[Any] | None = loader
        self._move = move
        self._sizes = host_ahead, device_ahead, movers
        self._ready: Channel | None = None
        self._stop: Callable[[], Any] = lambda: None

    def __next__(self) -> Any:
        if self._loader is not None:
            return self._start()
        if self._ready is None:
            raise StopIteration
        item = self._ready.get()
        if isinstance(item, _End):
            self.close()
            if item.error is not None:
                raise item.error
            raise StopIteration
        return item.result()

    def _start(self) -> Any:
        from torch_bridge.runtime.session import bound

        assert self._loader is not None
        loader, self._loader = self._loader, None
        batches = iter(loader)
        first = next(batches)
        host_ahead, device_ahead, movers = self._sizes
        host, ready = Channel(host_ahead), Channel(device_ahead)
        pool = ThreadPoolExecutor(movers, thread_name_prefix=f"{_THREAD_NAME}-move")
        threads = [
            threading.Thread(target=bound(_read), args=(batches, host), name=f"{_THREAD_NAME}-read", daemon=True),
            threading.Thread(target=_submit, args=(host, ready, pool, bound(self._move)), name=f"{_THREAD_NAME}-submit", daemon=True),
        ]
        self._ready = ready
        self._stop = weakref.finalize(self, _shut_down, host, ready, threads)
        for thread in threads:
            thread.start()
        return self._move(first)

    def close(self) -> None:
        """Stop the threads. Iterating further ends at once."""
        self._loader = self._ready = None
        self._stop()


class InStep(Iterator[Any]):
    """Iterates over `loader` on the caller's thread, each batch passed through `move`: nothing is read before it is asked for."""

    def __init__(self, loader: Iterable[Any], move: Callable[[Any], Any]):
        self._loader: Iterable[Any] | None = loader
        self._move = move
        self._batches: Iterator[Any] | None = None

    def __next__(self) -> Any:
        if self._loader is not None:
            self._batches, self._loader = iter(self._loader), None
        if self._batches is None:
            raise StopIteration
        try:
            return self._move(next(self._batches))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Iterating further ends at once."""
        self._loader = self._batches = None


def tells_where_it_is(loader: object) -> bool:
    """Whether a loader says, while somebody has a batch of it, if that is the last: accelerate's. Read ahead, it would say so too early, and
    `Accelerator.accumulate` and `gather_for_metrics` would take other batches for the last."""
    return hasattr(loader, "gradient_state") and hasattr(loader, "end_of_dataloader")


def _read(batches: Iterator[Any], host: Channel) -> None:
    """Without a `for` loop, which would call iter() of the iterator: one that rewinds itself then would start over."""
    try:
        while host.put(next(batches)):
            pass
    except StopIteration:
        host.put(_End())
    except BaseException as error:
        host.put(_End(error))


def _submit(host: Channel, ready: Channel, pool: ThreadPoolExecutor, move: Callable[[Any], Any]) -> None:
    """Have batches moved, until there are no more or a channel is closed; then the pool's threads end.

    Only this thread uses the pool: its locks are Python's, and do not open for a garbage collection inside of `submit` that closes the prefetcher.
    """
    wanted = True
    try:
        batch = host.get()
        while wanted and not isinstance(batch, _End):
            wanted = ready.put(pool.submit(move, batch))
            batch = host.get()
        wanted = wanted and ready.put(batch)
    except RuntimeError:  # Python ends: its pools take nothing more
        wanted = False
    finally:
        pool.shutdown(wait=False, cancel_futures=not wanted)


def _shut_down(host: Channel, ready: Channel, threads: list[threading.Thread]) -> None:
    host.close()
    ready.close()
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join(_JOIN_SECONDS)


def to_device(data: Any, device: torch.device) -> Any:
    """Nested data with its CPU tensors on `device`."""
    if device.type != "xla":
        tensors = nested.collect(data, lambda x: isinstance(x, torch.Tensor))
        return nested.replace(data, lambda x: isinstance(x, torch.Tensor), [t.to(device) for t in tensors])
    backend.ensure()
    from torch_bridge.recorder.copies import upload

    return nested.replace(data, _on_cpu, [upload(t).requires_grad_(t.requires_grad) for t in nested.collect(data, _on_cpu)])


def _on_cpu(x: object) -> bool:
    return isinstance(x, torch.Tensor) and x.device.type == "cpu"


def to_host(data: Any) -> Any:
    """Nested data with its xla tensors on the CPU. Tensors that are one on the device (tied weights) are one on the CPU."""
    tensors = nested.collect(data, _on_xla)
    if not tensors:
        return data
    from torch_bridge.recorder.copies import copied
    from torch_bridge.runtime import executor

    executor.sync()
    copies: dict[Any, torch.Tensor] = {}
    for t in tensors:
        key = id(t._storage), t._layout
        if key not in copies:
            copies[key] = copied(t)
    return nested.replace(data, _on_xla, [_as_on_device(t, copies[id(t._storage), t._layout]) for t in tensors])


def _as_on_device(t: torch.Tensor, host: torch.Tensor) -> torch.Tensor:
    return torch.nn.Parameter(host, t.requires_grad) if isinstance(t, torch.nn.Parameter) else host


def _on_xla(x: object) -> bool:
    return isinstance(x, torch.Tensor) and x.device.type == "xla"
