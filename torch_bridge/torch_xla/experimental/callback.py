"""`torch_xla.experimental.callback`."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from torch_bridge.torch_xla import _XLAC


def on_ready_callback(tensor: torch.Tensor, callback: Callable[[torch.Tensor], Any]) -> None:
    """`torch_xla.experimental.callback.on_ready_callback`: call `callback(tensor)` on another thread once the tensor's value is computed.

    What is pending is run, without waiting for it. An exception in the callback is reported as any thread's. Raises RuntimeError for tensors elsewhere.
    """
    from torch_bridge.runtime import executor

    t = _XLAC._xla(tensor)
    executor.materialize(t._storage)
    array = t._storage.array

    def wait() -> None:
        if array is not None and not array.is_deleted():  # deleted: a later step had it and took its place
            array.block_until_ready()
        callback(tensor)

    threading.Thread(target=wait, name="xla-on-ready", daemon=True).start()
