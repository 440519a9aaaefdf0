"""Where autocast is on for xla tensors: `torch.autocast("xla")`, whose dtype is bfloat16 unless said otherwise, and `torch.autocast("cuda")`.

Neuron's scripts say "cuda". Such a region is one for "xla", too, of its dtype, with CUDA's op lists (`uses_cuda_lists`). In nested regions the
innermost says whether autocast is on and its dtype; CUDA's lists hold as long as a region for "cuda" is on.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.utils.checkpoint
from torch.jit import _builtins

DEFAULT = torch.bfloat16
_threads = threading.local()


def uses_cuda_lists() -> bool:
    """Whether it is `torch.autocast("cuda")` that is on in this thread."""
    return torch.is_autocast_enabled("cuda")


def name() -> str:
    """The device type whose lists are used, "xla" or "cuda"."""
    return "cuda" if uses_cuda_lists() else "xla"


def current() -> tuple[str, torch.dtype] | None:
    """Whose lists are used and the dtype, for xla tensors in this thread; None where autocast is off."""
    return (name(), torch.get_autocast_dtype("xla")) if torch.is_autocast_enabled("xla") else None


@contextlib.contextmanager
def region(found: tuple[str, torch.dtype] | None, cached: bool) -> Iterator[None]:
    """A block in which `current()` is `found`."""
    lists, dtype = found or ("xla", DEFAULT)
    inner = torch.autocast("xla", dtype, found is not None, cached, as_cuda=lists == "cuda")  # type: ignore[call-arg]
    with torch.autocast("cuda", enabled=False, cache_enabled=cached), inner:
        yield


def install(prepare_cuda: Callable[[], Any]) -> None:
    """Make all this so. `prepare_cuda` is called whenever a region for "cuda" begins."""
    _default_to_bfloat16()
    _answer_older_names()
    _extend_cuda_regions(prepare_cuda)
    _keep_lists_in_checkpoints()


def _default_to_bfloat16() -> None:
    """torch keeps the dtype per thread, and starts each with float16."""
    get, put = torch.get_autocast_dtype, torch.set_autocast_dtype

    def start(device_type: str) -> None:
        if device_type == "xla" and not hasattr(_threads, "started"):
            _threads.started = True
            put("xla", DEFAULT)

    @functools.wraps(get)
    def get_autocast_dtype(device_type: str) -> torch.dtype:
        start(device_type)
        return get(device_type)

    @functools.wraps(put)
    def set_autocast_dtype(device_type: str, dtype: torch.dtype) -> None:
        start(device_type)
        put(device_type, dtype)

    for ours, torchs in ((get_autocast_dtype, get), (set_autocast_dtype, put)):
        _builtins._register_builtin(ours, _builtins._find_builtin(torchs))  # for TorchScript
    torch.get_autocast_dtype, torch.set_autocast_dtype = get_autocast_dtype, set_autocast_dtype


def _answer_older_names() -> None:
    """`torch.is_autocast_xla_enabled()` and relatives mean device "xla"; torch's own mean a backend that is not there."""
    found: Any = torch
    found.is_autocast_xla_enabled = lambda: torch.is_autocast_enabled("xla")
    found.set_autocast_xla_enabled = lambda enabled: torch.set_autocast_enabled("xla", enabled)
    found.get_autocast_xla_dtype = lambda: torch.get_autocast_dtype("xla")
    found.set_autocast_xla_dtype = lambda dtype: torch.set_autocast_dtype("xla", dtype)


def _extend_cuda_regions(prepare: Callable[[], Any]) -> None:
    cls: Any = torch.autocast
    enter, leave = cls.__enter__, cls.__exit__

    @functools.wraps(enter)  # TorchScript compiles the source of what is wrapped
    def __enter__(self: Any) -> Any:
        result = enter(self)
        if self.device == "cuda":
            prepare()
            self.xla_before = torch.is_autocast_enabled("xla"), torch.get_autocast_dtype("xla")
            torch.set_autocast_enabled("xla", self._enabled)
            if self._enabled:
                torch.set_autocast_dtype("xla", self.fast_dtype)
        return result

    @functools.wraps(leave)
    def __exit__(self: Any, *error: Any) -> Any:
        if self.device == "cuda":
            enabled, dtype = self.xla_before
            torch.set_autocast_enabled("xla", enabled)
            torch.set_autocast_dtype("xla", dtype)
        return leave(self, *error)

    cls.__enter__, cls.__exit__ = __enter__, __exit__


def _keep_lists_in_checkpoints() -> None:
    """A checkpoint of xla tensors recomputes under autocast("xla", ...) what it was told in the first run: have it told which lists were used."""
    found: Any = torch.utils.checkpoint
    kwargs, init = found._get_autocast_kwargs, torch.autocast.__init__

    def _get_autocast_kwargs(device_type: str = "cuda") -> Any:
        device, cpu = kwargs(device_type)
        return ({**device, "as_cuda": True} if device_type == "xla" and uses_cuda_lists() else device), cpu

    @functools.wraps(init)
    def __init__(self: Any, *args: Any, as_cuda: bool = False, **options: Any) -> None:
        init(self, *args, **options)
        if as_cuda:
            self.device = "cuda"

    found._get_autocast_kwargs = _get_autocast_kwargs
    torch.autocast.__init__ = __init__  # type: ignore[method-assign]
