"""`torch_xla.distributed.xla_multiprocessing`, known as `xmp`."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch


def spawn(
    fn: Callable[..., Any],
    args: tuple[Any, ...] = (),
    nprocs: int | None = None,
    join: bool = True,
    daemon: bool = False,
    start_method: str = "spawn",
) -> None:
    """`xmp.spawn`: call `fn(index, *args)` on every worker. A job has one worker, so this calls `fn(0, *args)` in this process."""
    if nprocs not in (None, 1):
        raise NotImplementedError(
            f"xmp.spawn(nprocs={nprocs}): this release runs one worker per job. Leave nprocs out (or pass 1); worlds of several workers "
            "come in a later release."
        )
    fn(0, *args)


class MpModelWrapper:
    """`xmp.MpModelWrapper`: holds a model made before `spawn`, to be moved to the device inside it."""

    def __init__(self, model: torch.nn.Module):
        self._model = model
        self._lock = threading.Lock()

    def to(self, device: Any) -> torch.nn.Module:
        """The model, moved to `device`."""
        with self._lock:
            self._model.to(device)
        return self._model


class MpSerialExecutor:
    """`xmp.MpSerialExecutor`: runs a function in one worker at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def run(self, fn: Callable[[], Any]) -> Any:
        """What `fn` returns."""
        with self._lock:
            return fn()
