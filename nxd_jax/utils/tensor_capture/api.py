"""`neuronx_distributed.utils.tensor_capture.api`: the functions that scripts call."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from nxd_jax.utils.tensor_capture.model_modification import find_available_modules, modify_model_for_tensor_capture, restore_model
from nxd_jax.utils.tensor_capture.registry import TensorRegistry


def enable_tensor_capture(
    model: nn.Module, modules_to_capture: Sequence[str] | None = None, max_tensors: int | None = None, capture_inputs: bool = False
) -> nn.Module:
    """Keep what these modules of the model give (and get, with `capture_inputs`) from its next forward on; returns the model itself.

    max_tensors: how many tensors `register_tensor` keeps in one forward, for a fixed number of outputs; None for all. Each forward of the model replaces what
    the one before has left; of a module that runs several times in one, the last counts.

    Raises ValueError for names that are not in `get_available_modules(model)`, or a negative `max_tensors`.
    """
    return modify_model_for_tensor_capture(model, modules_to_capture, max_tensors, capture_inputs)


def disable_tensor_capture(model: nn.Module) -> nn.Module:
    """Capture no more, and forget what was captured; returns the model."""
    restore_model(model)
    TensorRegistry.get_instance().clear()
    return model


def get_available_modules(model: nn.Module) -> list[str]:
    """The names of all modules inside a model."""
    return find_available_modules(model)


def register_tensor(name: str, tensor: torch.Tensor) -> None:
    """Keep a copy of a tensor as `manual_{name}`, the next of that name as `manual_{name}_1`, and so on; does nothing while no model is captured."""
    TensorRegistry.get_instance().register_tensor(name, tensor)


def get_captured_tensors_dict() -> dict[str, torch.Tensor]:
    """Copies of the tensors captured, without gradients: for each module in the order in which they were named `{module}.inputs...` and `{module}.outputs...`,
    then those of `register_tensor`. Entries of tuples, lists, dicts and dataclasses have their index or name after it: `{module}.outputs.0`,
    `{module}.inputs.kwargs.mask`.
    """
    return TensorRegistry.get_instance().get_captured_tensors_dict()
