"""What models of traced programs have in common, and what their states begin with."""

from __future__ import annotations

import abc
from typing import Any

import torch


class BaseNxDModel(abc.ABC):
    """`nxd_model.BaseNxDModel`: the interface of `NxDModel`."""

    @abc.abstractmethod
    def add(self, key: str, trace_artifacts: Any, compilation_artifacts: Any) -> BaseNxDModel:
        """Add a traced program."""

    @abc.abstractmethod
    def set_weights(self, sharded_checkpoint: list[dict[str, torch.Tensor]]) -> None:
        """Give each rank its weights."""

    @abc.abstractmethod
    def to_neuron(self) -> None:
        """Put the model on its devices."""

    @abc.abstractmethod
    def save(self, path_to_save: str, save_weights: bool = False) -> None:
        """Write a file."""


class StateInitializer(torch.nn.Module):
    """`nxd_model.StateInitializer`: zeros for each rank's states. shapes, dtypes: by name; called, it gives a dict for each of `local_ranks_size` ranks."""

    def __init__(self, shapes: dict[str, list[int]], dtypes: dict[str, torch.dtype], local_ranks_size: int):
        super().__init__()
        self.shapes = shapes
        self.dtypes = dtypes
        self.local_ranks_size = local_ranks_size

    def forward(self) -> list[dict[str, torch.Tensor]]:
        """The zeros, CPU tensors."""
        return [{n: torch.zeros(s, dtype=self.dtypes[n]) for n, s in self.shapes.items()} for _ in range(self.local_ranks_size)]
