"""`torch.classes.neuron`: the classes of the Neuron runtime that scripts name."""

from __future__ import annotations

from typing import Any

import torch


class Runtime:
    """`torch.classes.neuron.Runtime`: the runtime of the process. Scripts close it at their end; there is nothing to close."""

    def unsafe_close(self) -> None:
        """Accepted without effect: memory is given back with the tensors and models that hold it."""

    def initialize(self) -> None:
        """Accepted without effect: JAX starts with the first tensor or model."""

    def set_default_neuron_cores(self, start: int, count: int) -> None:
        """Accepted without effect: `nxd-run` and NxDParallelState say which ranks there are."""


class _Classes:
    """What is there, and what to use instead of the rest."""

    Runtime = Runtime

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(
            f"torch.classes.neuron.{name} runs NEFF files on Neuron hardware: use neuronx_distributed.ModelBuilder or torch_neuronx.trace, which run on JAX"
        )


def install() -> None:
    """Let scripts find the classes."""
    torch.classes.neuron = _Classes()  # type: ignore[attr-defined]
