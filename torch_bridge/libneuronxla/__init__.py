"""`libneuronxla`: the few names of Neuron's XLA plugin that scripts call. JAX needs no plugin, so there is nothing to set up."""

from __future__ import annotations

import warnings
from collections.abc import Callable

from torch_bridge.device import aliasing

aliasing.refuse_original("libneuronxla")
aliasing.install("libneuronxla", __name__)

__version__ = "2.2"
"""The release series of Neuron's SDK 2.2x, whose names these are."""

__all__ = ["__version__", "configure_environment", "hook", "register_hlo_snapshot_callback"]

SnapshotCallback = Callable[[str, int, int], str]
"""(name of the graph, index of the device, how often it ran) -> "", "inputs", "outputs" or "inputs outputs"."""


def _dump_inputs(name: str, addressable_device_index: int, execution_count: int) -> str:
    return "inputs"


_callback: SnapshotCallback = _dump_inputs


def register_hlo_snapshot_callback(callback: SnapshotCallback) -> SnapshotCallback:
    """`libneuronxla.register_hlo_snapshot_callback`: keeps the callback and returns the one before it, at first one that answers "inputs".

    Snapshots of a program's inputs and outputs are not written, so it is never called, and a warning says so. Raises TypeError if it cannot be called.
    """
    global _callback
    if not callable(callback):
        raise TypeError(
            f"register_hlo_snapshot_callback takes a function of (name, addressable_device_index, execution_count), got {callback!r}"
        )
    warnings.warn(
        "libneuronxla.register_hlo_snapshot_callback: snapshots of a program's inputs and outputs are not written here, so the callback is never called. "
        "XLA_FLAGS=--xla_dump_to=<folder> writes the programs, torch.save the tensors",
        stacklevel=2,
    )
    before, _callback = _callback, callback
    return before


def configure_environment() -> None:
    """`libneuronxla.configure_environment`: nothing to do."""


def hook() -> None:
    """`libneuronxla.hook`: nothing to do."""
