"""The adapters that a traced model holds: by name, in slots of the weights lora_A and lora_B of its programs. Slot 0 is that of rows without one."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from nxd_jax.inference.config import InferenceConfig
from nxd_jax.inference.lora_serving import Adapter, LoraServingConfig, Place, read_adapter
from nxd_jax.tensor_parallel import sharded_weights
from nxd_jax.trace import layouts
from nxd_jax.trace.nxd_model import NxDModel
from torch_bridge.aot import facts


@dataclasses.dataclass(frozen=True)
class Base:
    """The model that adapters are for. sizes: inputs and outputs of its layers, by the last part of their names."""

    layers: int
    heads: int
    kv_heads: int
    sizes: dict[str, tuple[int, int]]

    @classmethod
    def of(cls, config: Any, head_dim: int) -> Base:
        """Of transformers' configuration of a Llama, Mistral or Qwen2."""
        hidden, inner = config.hidden_size, config.intermediate_size
        q, kv = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
        sizes = {"q_proj": (hidden, q), "k_proj": (hidden, kv), "v_proj": (hidden, kv), "o_proj": (q, hidden)}
        sizes |= {"gate_proj": (hidden, inner), "up_proj": (hidden, inner), "down_proj": (inner, hidden)}
        return cls(config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads, sizes)

    def check(self, adapter: Adapter, room: LoraServingConfig) -> None:
        """Raise ValueError for an adapter that is of another model, above the rank that there is room for, or of layers that have none."""
        for at, (a, b) in adapter.factors.items():
            inputs, outputs = self.sizes[at.module]
            if at.layer >= self.layers or (a.shape[1], b.shape[0]) != (inputs, outputs):
                raise ValueError(
                    f"the adapter in {adapter.folder} is of another base model: its {at.module} of layer {at.layer} has {a.shape[1]} inputs and {b.shape[0]} "
                    f"outputs, and this model has {self.layers} layers, whose {at.module} has {inputs} and {outputs}"
                )
        if adapter.rank > room.max_lora_rank:
            raise ValueError(
                f"the adapter in {adapter.folder} has rank {adapter.rank}, and the model was traced for max_lora_rank={room.max_lora_rank}: trace it for more"
            )
        missing = sorted({at.module for at in adapter.factors} - set(room.target_modules))
        if missing:
            raise ValueError(
                f"the adapter in {adapter.folder} is of {', '.join(missing)}, and the model was traced for target_modules {', '.join(room.target_modules)}: "
                "trace it for all of them"
            )


class AdapterSlots:
    """Loads adapters into a model that is on its devices; nothing is compiled for that. base, room: what it was traced for. names: by name the slot."""

    def __init__(self, model: NxDModel, options: InferenceConfig, base: Base, names: dict[str, int] | None = None):
        assert options.lora_config is not None
        self.base, self.room, self.names = base, options.lora_config, dict(names or {})
        self._model = model
        tag = min(model.get_available_keys())
        self._held = {t.name: t for t in facts.from_json(model.get_metaneff(tag)).weights}

    def slots(self, names: Sequence[str | None]) -> list[int]:
        """Of adapters, None meaning no one. Raises ValueError for a name that is not loaded."""
        for name in names:
            if name is not None and name not in self.names:
                raise ValueError(f"no adapter is named {name!r}: there are {self._shown()}; load_adapter(name, folder) loads one")
        return [0 if name is None else self.names[name] for name in names]

    def load(self, name: str, folder: str) -> int:
        """Put a folder's adapter under a name, in place of one that has it already; its slot. If that raises nothing has changed: ValueError for one that does
        not fit or has no room, and what `read_adapter` raises."""
        adapter = read_adapter(folder)
        self.base.check(adapter, self.room)
        free = [slot for slot in range(1, self.room.max_loras + 1) if slot not in self.names.values()]
        if name not in self.names and not free:
            raise ValueError(
                f"there is no room for adapter {name!r} beside {self._shown()} (max_loras={self.room.max_loras}): unload_adapter(name) one"
            )
        slot = self.names.get(name) or free[0]
        self._write(slot, adapter)
        self.names[name] = slot
        return slot

    def unload(self, name: str) -> int:
        """Take an adapter out; the slot that it had. Raises ValueError for a name that is not loaded."""
        (slot,) = self.slots([name])
        self._write(slot, None)
        del self.names[name]
        return slot

    def _shown(self) -> str:
        return ", ".join(self.names) or "none"

    def _write(self, slot: int, adapter: Adapter | None) -> None:
        """Every layer's factors; zeros where the adapter has none."""
        for name in [n for n in self._held if n.endswith(".lora_A")]:
            parts = name.split(".")
            at = Place(int(parts[2]), parts[-2])
            factors = self._full(at, adapter)
            for own, full in zip((name, f"{name[:-1]}B"), factors, strict=True):
                self._put(own, slot, full)

    def _full(self, at: Place, adapter: Adapter | None) -> tuple[torch.Tensor, torch.Tensor]:
        """A and B of a layer, with rows and columns of zeros up to the rank that there is room for."""
        inputs, outputs = self.base.sizes[at.module]
        found = None if adapter is None else adapter.factors.get(at)
        a, b = found or (torch.zeros(0, inputs), torch.zeros(outputs, 0))
        more = self.room.max_lora_rank - a.shape[0]
        return sharded_weights.padded(a, 0, more), sharded_weights.padded(b, 1, more)

    def _put(self, name: str, slot: int, full: torch.Tensor) -> None:
        """Write one slot of a weight on all ranks of this process."""
        of, model = self._held[name], self._model
        (cut,) = of.cuts or (None,)
        parts = [full] if cut is None else layouts.parts_of(full, cut, cut.parts, cut.dim - 1)
        for rank in range(model.start_rank, model.start_rank + (1 if of.shared else model.local_ranks_size)):
            value = model.read_from_neuron_buffer(name, rank)
            value[slot] = parts[0 if cut is None else cut.index[rank]].to(value.dtype)
            model.write_to_neuron_buffer(value, name, rank)
