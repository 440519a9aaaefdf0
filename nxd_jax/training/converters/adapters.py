"""Checkpoints with LoRA adapters beside the weights: the weights with the adapters added."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

from nxd_jax.checkpoint import reading, writing
from nxd_jax.checkpoint.full_states import Full, FullState
from nxd_jax.modules.lora import storage
from nxd_jax.modules.lora.state import CONFIG

A, B = ".lora_A.", ".lora_B."
MERGE = "peft.save_lora_base=True and peft.merge_lora=True"


def refuse(names: Iterable[str], folder: Path) -> None:
    """Raise ValueError for files of ranks that hold adapters."""
    if any(A in name for name in names):
        raise ValueError(
            f"{folder} holds adapters (LoRA), which are added to the weights only where nxdt-train saved them: go on from it "
            f"(exp_manager.resume_from_checkpoint) with {MERGE}, and convert what that saves"
        )


def add(state: FullState, folder: Path) -> None:
    """Add the adapters in a checkpoint of ours to its weights, in place, as `peft.merge_lora` does.

    Raises ValueError for adapters without the weights, and where nothing says by how much they count.
    """
    if not any(A in name for name in state.model):
        return
    ends = {name: name.replace(B, ".") for name in state.model if B in name}
    if missing := [base for base in ends.values() if base not in state.model]:
        raise ValueError(
            f"{folder} holds adapters alone (peft.save_lora_base: False), without {reading.listed(missing)}: go on from it with peft.save_lora_base=True, and "
            "convert what that saves"
        )
    ranks = {full.need.shape[0] for name, full in state.model.items() if A in name}
    scaling = _scaling(folder, ranks)
    for name, base in ends.items():
        first = state.model[f"{name.partition(B)[0]}{A}weight"]
        state.model[base] = dataclasses.replace(
            state.model[base], read=_sum(state.model[base], first, state.model[name], scaling, f"{folder}: {name}")
        )
    state.model = {name: full for name, full in state.model.items() if A not in name and B not in name}


def _scaling(folder: Path, ranks: set[int]) -> float:
    """What the product of the two factors is multiplied by. ranks: inner sizes of the adapters."""
    other = reading.Folder(folder / writing.MODEL).objects().get("other") or {}
    values = other.get(CONFIG) or storage.config_near(str(folder / writing.MODEL), str(folder))
    if values is None:
        raise ValueError(
            f"{folder} holds adapters and not their configuration (peft.save_lora_config_adapter: False): put the adapter_config.json that training wrote into "
            "it, which says lora_rank and lora_alpha"
        )
    found = storage.config_of(values, str(folder))
    if ranks != {found.lora_rank}:
        raise ValueError(
            f"{folder} holds adapters of rank {', '.join(map(str, sorted(ranks)))}, and their configuration says {found.lora_rank}: it is another's"
        )
    return found.scaling


def _sum(base: Full, first: Full, second: Full, scaling: float, where: str) -> Callable[[], torch.Tensor]:
    def read() -> torch.Tensor:
        weight, change = base.read(), second.read() @ first.read() * scaling
        if change.shape != weight.shape:
            raise ValueError(
                f"{where} makes {list(change.shape)} of a weight of {list(weight.shape)}: only adapters of linear layers are added here"
            )
        return (weight + change).to(weight.dtype)

    return read
