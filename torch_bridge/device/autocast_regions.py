"""What torch should know of autocast on xla: its dtype is bfloat16 unless said otherwise, its older names, and that "cuda" is another device.

`torch.autocast("cuda")`, which scripts for Neuron wrote in the days of torch 1.13, casts no op on xla tensors with torch_xla 2.1 and later: the parallel layers
of neuronx_distributed alone look at it. So it is here, and it is said once.
"""

from __future__ import annotations

import functools
import threading
import warnings
from typing import Any

import torch
from torch.jit import _builtins

from torch_bridge.config import capturing

DEFAULT = torch.bfloat16
_threads = threading.local()
_noted = False


def install() -> None:
    """Make all this so."""
    _default_to_bfloat16()
    _answer_older_names()
    _watch_regions()


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


def _watch_regions() -> None:
    cls: Any = torch.autocast
    enter = cls.__enter__

    @functools.wraps(enter)  # TorchScript compiles the source of what is wrapped
    def __enter__(self: Any) -> Any:
        if self.device == "cuda" and self._enabled and not _noted:
            _note()
        if self.device == "cpu" and self._enabled and capturing.inside():
            _note_cpu()
        return enter(self)

    cls.__enter__ = __enter__


def _note_cpu() -> None:
    warnings.warn(
        "torch.autocast('cpu') casts nothing in a module that is traced or captured: its graph is one for xla, as with torch_neuronx.trace. Use "
        "torch.autocast('xla', dtype=torch.bfloat16) there, or convert the module before",
        stacklevel=3,
    )


def _note() -> None:
    """Say it once, where there is no CUDA device that could be meant."""
    global _noted
    _noted = True
    if not torch.cuda.is_available():
        warnings.warn(
            "torch.autocast('cuda') casts what the parallel layers of neuronx_distributed compute and no other operation on xla tensors, as with torch_xla 2.1 "
            "and later. torch.autocast('xla', dtype=torch.bfloat16) casts those of torch_xla's lists.",
            stacklevel=3,
        )
