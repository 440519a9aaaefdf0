"""LoRA adapters that are served beside each other: how many, of which layers, and the folders of PEFT that they come from."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from nxd_jax.checkpoint.safetensors_files import Hub
from nxd_jax.modules.lora import folders, peft_format, peft_tensors

COLUMNS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
"""Layers whose outputs ranks share out."""
ROWS = ("o_proj", "down_proj")
"""Layers whose inputs ranks share out."""
FAMILIES = ("llama", "mistral", "qwen2")
"""By `model_type`: the models that adapters can be served for."""
_NAME = re.compile(r"model\.layers\.(\d+)\.(self_attn|mlp)\.(\w+)\.lora_([AB])\.weight")


@dataclasses.dataclass(frozen=True)
class LoraServingConfig:
    """`LoraServingConfig`: the room that a traced model has for adapters.

    max_loras: adapters that it holds at once, beside none. max_lora_rank: the largest rank of one; smaller ones are filled with zeros. target_modules: layers
    that can have adapters, some of q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj (default all); an adapter may leave some out. lora_ckpt_paths:
    by name the folders of PEFT that `LanguageModel.from_pretrained` loads.

    Each rank holds (max_loras + 1) x max_lora_rank x (inputs + outputs) numbers for each of these layers, of which one dim is shared out. They are
    float32 beside bfloat16 and float16 weights, as in PEFT.
    Raises ValueError for numbers below 1, other layers, and more folders than there is room for; TypeError for lora_ckpt_paths without names.
    """

    max_loras: int = 1
    max_lora_rank: int = 16
    target_modules: tuple[str, ...] = (*COLUMNS, *ROWS)
    lora_ckpt_paths: dict[str, str] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("max_loras", "max_lora_rank"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"LoraServingConfig: {name}={value!r} must be a whole number of at least 1")
        known = (*COLUMNS, *ROWS)
        given = (self.target_modules,) if isinstance(self.target_modules, str) else tuple(self.target_modules)
        wrong = [name for name in given if name not in known]
        if wrong or not given:
            raise ValueError(f"LoraServingConfig: target_modules={list(given)} must be some of {', '.join(known)}")
        object.__setattr__(self, "target_modules", tuple(name for name in known if name in given))
        if not isinstance(self.lora_ckpt_paths, Mapping):
            raise TypeError(f"LoraServingConfig: lora_ckpt_paths={self.lora_ckpt_paths!r} must be a dict of names and folders")
        object.__setattr__(self, "lora_ckpt_paths", {name: os.fspath(path) for name, path in self.lora_ckpt_paths.items()})
        if len(self.lora_ckpt_paths) > self.max_loras:
            raise ValueError(
                f"LoraServingConfig: {len(self.lora_ckpt_paths)} lora_ckpt_paths are more than max_loras={self.max_loras}: raise it"
            )

    @classmethod
    def of_folders(cls, paths: Mapping[str, str], room: int = 0) -> LoraServingConfig:
        """Just enough room for these folders of PEFT, by name, and `room` adapters more. Raises as `read_adapter` does."""
        found = [read_adapter(path) for path in paths.values()]
        modules = {place.module for adapter in found for place in adapter.factors}
        return cls(
            len(found) + room, max((adapter.rank for adapter in found), default=16), tuple(modules or (*COLUMNS, *ROWS)), dict(paths)
        )


class Place(NamedTuple):
    """A layer that has an adapter. module: the last part of its name."""

    layer: int
    module: str


class Adapter(NamedTuple):
    """What a folder of PEFT holds. factors: A [rank, inputs] and B [outputs, rank], float32, B times PEFT's scale."""

    folder: str
    factors: dict[Place, tuple[torch.Tensor, torch.Tensor]]

    @property
    def rank(self) -> int:
        """The largest."""
        return max(a.shape[0] for a, _ in self.factors.values())


def read_adapter(folder: str | os.PathLike[str]) -> Adapter:
    """The adapter in a folder that PEFT's `save_pretrained` wrote, or `nxd_jax.modules.lora`.

    Raises FileNotFoundError without its files; ValueError for kinds of adapters that LoRA layers do not have here, for one whose start changed the base model
    (PiSSA, OLoRA, CorDA, LoftQ), without tensors, with half a pair, and for tensors of layers that cannot have adapters while they are served (embeddings,
    heads, biases, whole modules).
    """
    place = Path(folder)
    for name in (folders.CONFIG_FILE, peft_format.TENSORS_FILE):
        if not (place / name).is_file():
            raise FileNotFoundError(f"{place} is no folder of PEFT: there is no {name}; save adapters with PEFT's save_pretrained")
    config = folders.read_json(str(place / folders.CONFIG_FILE))
    try:
        peft_format.config_from_peft(config)
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from None
    hub = Hub(place / peft_format.TENSORS_FILE)
    halves: dict[Place, dict[str, torch.Tensor]] = {}
    others = []
    for key in hub.entries:
        found = _NAME.fullmatch(peft_tensors.plain(key))
        if found is None or found[3] not in (*COLUMNS, *ROWS):
            others.append(peft_tensors.plain(key))
        else:
            halves.setdefault(Place(int(found[1]), found[3]), {})[found[4]] = hub.read(key)
    if others or not halves:
        what = f"has {', '.join(others[:3])}" + (f" and {len(others) - 3} more" if len(others) > 3 else "") if others else "is empty"
        raise ValueError(
            f"the adapter in {place} {what}: only LoRA of {', '.join((*COLUMNS, *ROWS))} in the layers of a Llama, Mistral or Qwen2 can be served; merge the "
            "adapter into the model with PEFT's merge_and_unload, and generate with that"
        )
    return Adapter(str(place), {at: _scaled(place, at, pair, config) for at, pair in halves.items()})


def _scaled(folder: Path, at: Place, pair: Mapping[str, torch.Tensor], config: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    name = f"model.layers.{at.layer}.{'self_attn' if at.module in ('q_proj', 'k_proj', 'v_proj', 'o_proj') else 'mlp'}.{at.module}"
    if set(pair) != {"A", "B"} or pair["A"].shape[0] != pair["B"].shape[1]:
        raise ValueError(f"the adapter in {folder} needs lora_A and lora_B of one rank for {name}")
    a, b = pair["A"].float(), pair["B"].float()
    return a, b * peft_tensors.scaling(name, a.shape[0], config)
