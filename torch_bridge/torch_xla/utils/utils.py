"""`torch_xla.utils.utils`, known as `xu`."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

from torch_bridge import nested


def getenv_as(name: str, type: Callable[[Any], Any], defval: Any = None) -> Any:
    """`xu.getenv_as`: an environment variable converted by `type`; for `bool`, "1", "true", "yes" and "on" count as true."""
    value = os.environ.get(name)
    if value is None:
        return defval
    return _flag(value) if type is bool else type(value)


def check_env_flag(name: str, default: str = "") -> bool:
    """`xu.check_env_flag`: whether an environment variable says yes."""
    return _flag(os.environ.get(name, default))


def _flag(value: str) -> bool:
    return value.strip().lower() in ("1", "true", "yes", "on", "y")


def get_free_tcp_ports(n: int = 1) -> list[int]:
    """`xu.get_free_tcp_ports`: ports that nothing listens on now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(n)]
        for s in sockets:
            s.bind(("", 0))
        return [s.getsockname()[1] for s in sockets]


class SampleGenerator:
    """`xu.SampleGenerator`: yields the same data `sample_count` times, in place of a loader."""

    def __init__(self, data: Any, sample_count: int):
        self._data = data
        self._sample_count = sample_count
        self._count = 0

    def __iter__(self) -> SampleGenerator:
        return SampleGenerator(self._data, self._sample_count)

    def __len__(self) -> int:
        return self._sample_count

    def __next__(self) -> Any:
        return self.next()

    def next(self) -> Any:
        if self._count >= self._sample_count:
            raise StopIteration
        self._count += 1
        return self._data


class FnDataGenerator:
    """`xu.FnDataGenerator`: yields (input, `func(input)`) pairs, inputs made by `gen_tensor(batch_size, *dims)`."""

    def __init__(self, func: Callable[..., Any], batch_size: int, gen_tensor: Callable[..., Any], dims: Any = None, count: int = 1):
        self._func = func
        self._batch_size = batch_size
        self._gen_tensor = gen_tensor
        self._dims = list(dims) if dims else [1]
        self._count = count
        self._emitted = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> FnDataGenerator:
        return FnDataGenerator(self._func, self._batch_size, self._gen_tensor, self._dims, self._count)

    def __next__(self) -> Any:
        return self.next()

    def next(self) -> Any:
        if self._emitted >= self._count:
            raise StopIteration
        self._emitted += 1
        data = self._gen_tensor(self._batch_size, *self._dims)
        return data, self._func(data)


class DataWrapper(nested.Wrapper):
    """`xu.DataWrapper`: base class of batches that list their tensors (`get_tensors`), and make of others what a loader gives in their place (`from_tensors`).

    Batches need not be one: loaders look into any object's attributes.
    """


class LazyProperty:
    """`xu.LazyProperty`: `value` is computed when first asked for."""

    def __init__(self, gen_fn: Callable[[], Any]):
        self._gen_fn = gen_fn

    @property
    def value(self) -> Any:
        if self._gen_fn is not None:
            self._value = self._gen_fn()
            self._gen_fn = None  # type: ignore[assignment]
        return self._value


class Cleaner:
    """`xu.Cleaner`: calls a function when it is garbage collected."""

    def __init__(self, func: Callable[[], Any]):
        self.func = func

    def __del__(self) -> None:
        self.func()


class TmpFolder:
    """`xu.TmpFolder`: a folder `name` that is deleted with this object."""

    def __init__(self) -> None:
        self.name = tempfile.mkdtemp()
        self.cleaner = Cleaner(lambda: shutil.rmtree(self.name, ignore_errors=True))


class TimedScope:
    """`xu.TimedScope`: prints how long a `with` block took."""

    def __init__(self, msg: str = "", printfn: Callable[..., Any] | None = None):
        self._message = msg
        self._print = printfn or eprint
        self._error: BaseException | None = None

    def __enter__(self) -> TimedScope:
        self._start = time.time()
        return self

    def __exit__(self, type: Any, value: Any, traceback: Any) -> None:
        if self._error is None:
            self._print(f"{self._message}{time.time() - self._start:.3f}s")

    def set_error(self, error: BaseException) -> None:
        self._error = error


def timed(fn: Callable[[], Any], msg: str = "", printfn: Callable[..., Any] | None = None) -> Any:
    """`xu.timed`: what `fn()` returns; prints how long it took."""
    with TimedScope(msg, printfn):
        return fn()


def eprint(*args: Any, **kwargs: Any) -> None:
    """`xu.eprint`: print to stderr."""
    print(*args, file=sys.stderr, **kwargs)  # noqa: T201


def null_print(*args: object, **kwargs: object) -> None:
    """`xu.null_print`: print nothing."""


def get_print_fn(debug: bool | None = None) -> Callable[..., None]:
    """`xu.get_print_fn`: `eprint` if debugging (`DEBUG=1` by default), else `null_print`."""
    return eprint if (check_env_flag("DEBUG") if debug is None else debug) else null_print


def as_list(t: object) -> Any:
    """`xu.as_list`: a tuple or list as it is, anything else as a tuple of one."""
    return t if isinstance(t, (tuple, list)) else (t,)


def list_copy_append(ilist: list[Any], item: Any) -> list[Any]:
    """`xu.list_copy_append`: a copy of the list with the item at the end."""
    return [*ilist, item]


def flatten_nested_tuple(inputs: object) -> Any:
    """`xu.flatten_nested_tuple`."""
    if not isinstance(inputs, (tuple, list)):
        return (inputs,)
    return tuple(x for part in inputs for x in flatten_nested_tuple(part))


def shape(inputs: object) -> tuple[int, ...]:
    """`xu.shape`: the shape of nested lists, or of a tensor."""
    if hasattr(inputs, "shape"):
        return tuple(inputs.shape)
    dims: list[int] = []
    while isinstance(inputs, (list, tuple)):
        dims.append(len(inputs))
        inputs = inputs[0] if inputs else None
    return tuple(dims)


def for_each_instance(value: Any, select_fn: Callable[[Any], bool], fn: Callable[[Any], Any]) -> None:
    """`xu.for_each_instance`: call `fn` on every selected value inside nested data."""
    for found in nested.collect(value, select_fn):
        fn(found)


def for_each_instance_rewrite(value: Any, select_fn: Callable[[Any], bool], fn: Callable[[Any], Any]) -> Any:
    """`xu.for_each_instance_rewrite`: a copy of nested data with `fn(x)` in place of every selected x."""
    return nested.replace(value, select_fn, [fn(x) for x in nested.collect(value, select_fn)])


def parallel_work(num_workers: int, fn: Callable[..., Any], *args: Any) -> Iterator[Any]:
    """`xu.parallel_work`: `map(fn, *args)` on threads, in the order of completion."""
    with ThreadPoolExecutor(num_workers) as pool:
        for future in as_completed([pool.submit(fn, *xs) for xs in zip(*args, strict=False)]):
            yield future.result()
