"""Folders of PEFT with random adapters, and transformers' models with one merged into their weights."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import peft
import torch

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def write(theirs: Any, place: Path, seed: int, modules: Sequence[str] | str = ALL, r: int = 4, **more: Any) -> Path:
    """Write an adapter for a model of transformers, which stays as it is. more: of peft.LoraConfig."""
    torch.manual_seed(seed)
    targets = modules if isinstance(modules, str) else list(modules)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # PEFT asks transformers by older names
        model = peft.get_peft_model(copy.deepcopy(theirs), peft.LoraConfig(r=r, target_modules=targets, **{"lora_alpha": 2 * r} | more))
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that heads are written whole
        model.save_pretrained(str(place))
    return place


def beside(theirs: Any, place: Path) -> Any:
    """The model with an adapter beside its weights, which it becomes a part of."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return peft.PeftModel.from_pretrained(theirs, str(place)).eval()


def merged(theirs: Any, place: Path | None) -> Any:
    """The model with an adapter in its weights; as it is without one."""
    if place is None:
        return theirs
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return peft.PeftModel.from_pretrained(copy.deepcopy(theirs), str(place)).merge_and_unload().eval()
