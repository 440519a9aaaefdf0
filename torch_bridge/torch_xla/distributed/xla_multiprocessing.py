"""`torch_xla.distributed.xla_multiprocessing`, known as `xmp`."""

from __future__ import annotations

import copy
import itertools
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.types import Device

from torch_bridge.mesh import world


def spawn(
    fn: Callable[..., Any],
    args: tuple[Any, ...] = (),
    nprocs: int | None = None,
    join: bool = True,
    daemon: bool = False,
    start_method: str = "spawn",
) -> None:
    """`xmp.spawn`: call `fn(index, *args)` for every worker of this host.

    All of them run in this process, together: `fn` is called once, and `index` is each worker's own number (`torch_bridge.mesh.rank_numbers`). How many: the
    world that a launcher or NEURON_RT_NUM_CORES made, else `nprocs`, else NEURONCORE_NUM_DEVICES or TPU_NUM_DEVICES, else one. `join`, `daemon`
    and `start_method` are accepted.
    """
    asked = nprocs if nprocs is not None else _count_from_environment()
    if asked is not None:
        if type(asked) is not int or asked < 1:
            raise ValueError(f"xmp.spawn: nprocs must be a positive number, got {nprocs!r}")
        world.require(asked)
    if nprocs is not None and nprocs not in (1, world.local_size()):
        raise ValueError(f"xmp.spawn(nprocs={nprocs}): this host has {world.local_size()} ranks; leave nprocs out, or {world.KNOB}")
    with _workers():
        fn(world.local_rank(), *args)


_RUNS = itertools.count(1)
_run = 0
"""The number of the `spawn` that is running, if it stands for several processes."""


@contextmanager
def _workers() -> Iterator[None]:
    global _run
    before, _run = _run, next(_RUNS) if world.local_size() > 1 else 0
    try:
        yield
    finally:
        _run = before


def _count_from_environment() -> int | None:
    text = os.environ.get("NEURONCORE_NUM_DEVICES") or os.environ.get("TPU_NUM_DEVICES")
    return int(text) if text else None


class MpModelWrapper:
    """`xmp.MpModelWrapper`: holds a model made before `spawn`, to be moved to the device inside it. Several workers train a copy, as processes of their own
    would: the next `spawn` begins with the model as it was."""

    def __init__(self, model: torch.nn.Module):
        self._model = model
        self._lock = threading.Lock()
        self._of_run: tuple[int, torch.nn.Module] = (0, model)

    def to(self, device: Device) -> torch.nn.Module:
        """The model, moved to `device`; the same one each time within a `spawn`."""
        with self._lock:
            if self._of_run[0] != _run:
                self._of_run = (_run, copy.deepcopy(self._model) if _run else self._model)
            return self._of_run[1].to(device)


class MpSerialExecutor:
    """`xmp.MpSerialExecutor`: runs a function in one worker at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def run(self, fn: Callable[[], Any]) -> Any:
        """What `fn` returns."""
        with self._lock:
            return fn()
