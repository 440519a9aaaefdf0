"""`neuronx_distributed.lightning.NeuronXLAAccelerator`: how many cores a `Trainer` runs on."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from pytorch_lightning.accelerators import XLAAccelerator
from pytorch_lightning.utilities.exceptions import MisconfigurationException

from torch_bridge.mesh import world

_COUNTS = ("NEURONCORE_NUM_DEVICES", "TPU_NUM_DEVICES")


class Unasked(int):
    """A number of cores that nobody asked for: `Trainer(devices="auto")`."""


class Cores(list[torch.device]):
    """The devices of a `Trainer`. asked: the ranks per machine that the user asked for, or None."""

    def __init__(self, count: int, asked: int | None):
        super().__init__(torch.device("xla", k) for k in range(count))
        self.asked = asked


class NeuronXLAAccelerator(XLAAccelerator):
    """`neuronx_distributed.lightning.NeuronXLAAccelerator`: the (emulated) NeuronCores of a machine.

    `Trainer(devices=...)`: a number of ranks per machine, `[i]` (one rank), or "auto": as many as the launcher started, else NEURONCORE_NUM_DEVICES or
    TPU_NUM_DEVICES, else as many as the parallel sizes need. (NxD: 8 for "auto".)
    """

    def __init__(self) -> None:
        """No question to torch_xla's runtime is needed."""

    @staticmethod
    def parse_devices(devices: Any) -> int | list[int]:
        """A number, or a list with one index. Raises MisconfigurationException for anything else."""
        found = devices
        if isinstance(found, str) and found.strip().rstrip(",").isdigit():
            found = int(found.strip().rstrip(","))
        if isinstance(found, Sequence) and not isinstance(found, str) and len(found) == 1 and _is_count(found[0], 0):
            return [int(found[0])]
        if _is_count(found, 1):
            return found
        raise MisconfigurationException(
            f"Trainer(devices={devices!r}): NeuronXLAStrategy takes a number of cores per machine (devices=32), one core by its index (devices=[3]) or 'auto'"
        )

    @staticmethod
    def get_parallel_devices(devices: int | list[int]) -> list[torch.device]:
        """One xla device for each rank on this machine."""
        count = 1 if isinstance(devices, list) else devices
        asked = None if isinstance(devices, Unasked) else count
        return Cores(count, asked)

    @staticmethod
    def auto_device_count() -> int:  # type: ignore[override]
        """What "auto" means now."""
        if world.current().fixed:
            return Unasked(world.local_size())
        for name in _COUNTS:
            value = os.environ.get(name, "")
            if value:
                if not value.isdigit() or int(value) < 1:
                    raise ValueError(f"{name}={value!r} must be a positive number")
                return int(value)
        return Unasked(world.local_size())

    @staticmethod
    def is_available() -> bool:  # type: ignore[override]
        """Always: without an accelerator, virtual devices of the CPU stand for cores."""
        return True

    @staticmethod
    def name() -> str:
        return "neuron"


def _is_count(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
