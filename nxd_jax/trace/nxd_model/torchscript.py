"""A traced model as `torch.jit.load` gives it: positional inputs as a list, others as a dict."""

from __future__ import annotations

from typing import Any

import torch

from nxd_jax.trace.nxd_model import nxd_model
from torch_bridge.aot import files


class TorchScriptNxDModel(torch.nn.Module):
    """`neuronx_distributed.TorchScriptNxDModel`: `model.forward(args, kwargs)` and `forward_ranked(args, kwargs, async_mode)`; `nxd_model` is the model.

    It is no script: `torch.jit.save` writes the model's file, and `torch.jit.load` of such a file gives one of these.
    """

    original_name = "TorchScriptNxDModel"

    def __init__(self, model: nxd_model.NxDModel, save_weights: bool = False):
        super().__init__()
        self.nxd_model = model
        self._save_weights = save_weights

    def forward(self, args: list[torch.Tensor] | None = None, kwargs: dict[str, torch.Tensor] | None = None) -> Any:
        """Rank 0's results for inputs that all ranks get."""
        return self.nxd_model(*(args or ()), **(kwargs or {}))

    def forward_ranked(
        self, args: list[list[torch.Tensor]] | None = None, kwargs: dict[str, list[torch.Tensor]] | None = None, async_mode: bool = False
    ) -> Any:
        """[result][rank], left on the device, for inputs with a tensor for each rank."""
        return self.nxd_model(*(args or ()), forward_mode="async" if async_mode else "ranked", **(kwargs or {}))

    def set_weights(self, sharded_checkpoint: list[dict[str, torch.Tensor]]) -> None:
        """`NxDModel.set_weights`."""
        self.nxd_model.set_weights(sharded_checkpoint)

    def replace_weights(self, sharded_checkpoint: list[dict[str, torch.Tensor]]) -> None:
        """`NxDModel.replace_weights`."""
        self.nxd_model.replace_weights(sharded_checkpoint)

    def to_neuron(self) -> None:
        """`NxDModel.to_neuron`."""
        self.nxd_model.to_neuron()

    def read_from_neuron_buffer(self, buffer_key: str, rank: int) -> torch.Tensor:
        """`NxDModel.read_from_neuron_buffer`."""
        return self.nxd_model.read_from_neuron_buffer(buffer_key, rank)

    def write_to_neuron_buffer(self, tensor: torch.Tensor, buffer_key: str, rank: int) -> None:
        """`NxDModel.write_to_neuron_buffer`."""
        self.nxd_model.write_to_neuron_buffer(tensor, buffer_key, rank)

    def save(self, f: Any, _extra_files: dict[str, Any] | None = None) -> None:
        """What `torch.jit.save` calls: write the model's file."""
        self.nxd_model._write(f, self._save_weights, _extra_files or {})

    def save_to_buffer(self, _extra_files: dict[str, Any] | None = None) -> bytes:
        """What `torch.jit.save` calls for a buffer."""
        return files.in_memory(lambda path: self.save(path, _extra_files))


def convert_nxd_model_to_torchscript_model(nxd_model: nxd_model.NxDModel, save_weights: bool = False) -> TorchScriptNxDModel:
    """`neuronx_distributed.convert_nxd_model_to_torchscript_model`: the same model, to be called as a `TorchScriptNxDModel`. save_weights: for its file."""
    return TorchScriptNxDModel(nxd_model, save_weights)


def loaded(opened: files.Opened) -> TorchScriptNxDModel:
    """What `torch.jit.load` gives for the file of an `NxDModel`."""
    return TorchScriptNxDModel(nxd_model.NxDModel._of(opened), bool(opened.ranks))
