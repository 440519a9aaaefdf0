"""What `NxDPPModel` is given, checked before anything is made of it."""

from __future__ import annotations

import inspect
import logging
from typing import Any

from torch import nn

logger = logging.getLogger("nxd_jax")


def check_numbers(**numbers: Any) -> None:
    """Raise ValueError for numbers that are not 1 or more."""
    for name, number in numbers.items():
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise ValueError(f"{name} must be a whole number, 1 or more, got {number!r}")


def check_names(**lists: Any) -> None:
    """Raise TypeError for what should be a list of names and is not. (The letters of a text would be taken for names.)"""
    for name, found in lists.items():
        if found is None or (isinstance(found, (list, tuple, set, frozenset)) and all(isinstance(x, str) for x in found)):
            continue
        example = [found] if isinstance(found, str) else ["..."]
        raise TypeError(f"{name} takes a list of names, got {found!r}: write {name}={example!r}")


def check_model(module: Any, layer: Any) -> None:
    """Raise ValueError without a layer class, TypeError for a model that is no module and for a layer that is no class."""
    if layer is None:
        raise ValueError("NxDPPModel needs transformer_layer_cls, the class of the model's repeated layer (or manual_pp_partition=True)")
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"NxDPPModel takes the whole model as a torch.nn.Module, got {type(module).__name__}; a list of layers needs manual_pp_partition=True"
        )
    if not inspect.isclass(layer) or not issubclass(layer, nn.Module):
        raise TypeError(f"transformer_layer_cls must be a class of torch.nn.Module, such as LlamaDecoderLayer, got {layer!r}")


def check_layers(layers: Any, chunks: int) -> None:
    """Raise AssertionError for layers of the manual mode that are no list, TypeError for those that are no modules, ValueError for several chunks."""
    if not isinstance(layers, list):
        raise AssertionError(f"manual_pp_partition=True takes the model as a list of layers, got {type(layers).__name__}")
    wrong = next((layer for layer in layers if not isinstance(layer, nn.Module)), None)
    if wrong is not None:
        raise TypeError(
            f"manual_pp_partition=True takes a list of torch.nn.Module, and one of these is of type {type(wrong).__name__}: wrap it in a module"
        )
    if chunks > 1:
        raise ValueError(f"manual_pp_partition=True has one stage on each rank, got virtual_pipeline_size={chunks}")


def warn_of_unused(manual: bool, **given: Any) -> None:
    """Warn of options that are for the other mode."""
    unused = [name for name, value in given.items() if value and name.startswith("manual_") is not manual]
    if unused:
        instead = (
            "cuts follow manual_pp_stage_partition_fn, and manual_pp_loss_fn makes the loss" if manual else "it is for lists of layers"
        )
        logger.warning("manual_pp_partition=%s leaves aside %s: %s", manual, ", ".join(unused), instead)
