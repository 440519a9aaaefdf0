"""`torch_neuronx.experimental.placement`: on which cores traced models run. Here they run on JAX's first device, wherever they are put."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


def set_neuron_cores(trace: object, start_nc: int = -1, nc_count: int = -1) -> None:
    """`placement.set_neuron_cores`: the cores of a traced model. Accepted; ValueError for numbers below -1 (all cores)."""
    _check(start_nc, nc_count)


def set_multicore(trace: object) -> None:
    """`placement.set_multicore`: a traced model on every core, for calls from several threads. Accepted."""


@contextlib.contextmanager
def neuron_cores_context(start_nc: int = -1, nc_count: int = -1) -> Iterator[None]:
    """`placement.neuron_cores_context`: the cores of models that are loaded in a block. Accepted; ValueError for numbers below -1 (all cores)."""
    _check(start_nc, nc_count)
    yield


@contextlib.contextmanager
def multicore_context() -> Iterator[None]:
    """`placement.multicore_context`: models that are loaded in a block are on every core. Accepted."""
    yield


def _check(start_nc: int, nc_count: int) -> None:
    for name, given in (("start_nc", start_nc), ("nc_count", nc_count)):
        if type(given) is not int or given < -1 or (name == "nc_count" and given == 0):
            raise ValueError(f"{name} must be a number of a core or of cores, or -1 for all, got {given!r}")
