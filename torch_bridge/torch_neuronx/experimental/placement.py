"""`torch_neuronx.experimental.placement`: on which cores traced models run. Can be imported, not used."""

from __future__ import annotations

from typing import Any


def set_neuron_cores(trace: Any, start_nc: int = -1, nc_count: int = -1) -> None:
    """`placement.set_neuron_cores`: not in this release."""
    raise _refused("set_neuron_cores")


def set_multicore(trace: Any) -> None:
    """`placement.set_multicore`: not in this release."""
    raise _refused("set_multicore")


def neuron_cores_context(start_nc: int = -1, nc_count: int = -1) -> Any:
    """`placement.neuron_cores_context`: not in this release."""
    raise _refused("neuron_cores_context")


def multicore_context() -> Any:
    """`placement.multicore_context`: not in this release."""
    raise _refused("multicore_context")


def _refused(name: str) -> NotImplementedError:
    return NotImplementedError(
        f"torch_neuronx.experimental.{name} places models of torch_neuronx.trace, which is not in this release. A script runs on several cores "
        "with nxd-run, torchrun or NEURON_RT_NUM_CORES."
    )
