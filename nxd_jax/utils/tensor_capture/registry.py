"""`neuronx_distributed.utils.tensor_capture.registry`: where captured tensors are kept."""

from __future__ import annotations

import re
from collections import Counter, OrderedDict
from collections.abc import Sequence
from typing import Any

import torch

_MOE = "moe_auto"
_MOE_STACKED = "auto_moe_stats.expert_index"


class CapturedModelInfo:
    """What is captured of a model: `module_tensors` and `manual_tensors` by name, and the hooks that do it."""

    def __init__(self, modules_to_capture: Sequence[str], max_tensors: int | None = None, capture_inputs: bool = False) -> None:
        self.modules_to_capture = list(modules_to_capture)
        self.max_tensors = max_tensors
        self.capture_inputs = capture_inputs
        self.hooks: list[Any] = []
        self.module_tensors: OrderedDict[str, torch.Tensor] = OrderedDict()
        self.manual_tensors: OrderedDict[str, torch.Tensor] = OrderedDict()
        self.manual_tensors_keys: Counter[str] = Counter()
        self._done: set[str] = set()

    def forward_begins(self) -> None:
        """Drop what is left of the last forward; what was registered since stays."""
        for tensors in (self.module_tensors, self.manual_tensors):
            for key in self._done & set(tensors):
                del tensors[key]
        self.manual_tensors_keys.clear()
        self._done = set()

    def forward_ends(self) -> None:
        """What there is now belongs to this forward."""
        self._done = {*self.module_tensors, *self.manual_tensors}


class TensorRegistry:
    """`TensorRegistry.get_instance()` is the one that everything uses. enabled: whether tensors are taken. model_info: what is captured."""

    _instance: TensorRegistry | None = None

    @classmethod
    def get_instance(cls) -> TensorRegistry:
        """The registry of this process."""
        if cls._instance is None:
            cls._instance = cls()
        return cls._instance

    def __init__(self) -> None:
        self.enabled = False
        self.model_info = CapturedModelInfo([], 10)

    def clear(self) -> None:
        """Forget all tensors and modules, and take the hooks away; `max_tensors` is 10 then."""
        self.remove_hooks()
        self.model_info = CapturedModelInfo([], 10)

    def configure(
        self, enabled: bool = False, modules: Sequence[str] | None = None, max_tensors: int | None = None, capture_inputs: bool = False
    ) -> None:
        """Begin anew with these settings; hooks of before are taken away. Raises ValueError for a negative `max_tensors`."""
        if max_tensors is not None and max_tensors < 0:
            raise ValueError(f"max_tensors={max_tensors} must be 0 or more, or None to keep all tensors")
        self.remove_hooks()
        self.enabled = enabled
        self.model_info = CapturedModelInfo(modules or [], max_tensors, capture_inputs)

    def register_tensor(self, name: Any, tensor: torch.Tensor, neu_module: Any = None) -> None:
        """Keep a copy. `{module}`, `{module}.inputs...` and `{module}.outputs...` of a module that is captured are its own; all other names are manual ones.

        neu_module: the module that gave it. Of an lm_head's outputs the padding is cut.
        Raises ValueError for an lm_head with sequence parallelism, whose outputs lack the other ranks' part of the sequence.
        """
        if not self.enabled:
            return
        copy = tensor.detach().clone()
        if isinstance(name, str) and any(_is_of(name, module) for module in self.model_info.modules_to_capture):
            self.model_info.module_tensors[name] = _without_padding(copy, name, neu_module)
        else:
            self._register_manual(name, copy)

    def _register_manual(self, name: Any, tensor: torch.Tensor) -> None:
        kept, counts, limit = self.model_info.manual_tensors, self.model_info.manual_tensors_keys, self.model_info.max_tensors
        if limit is not None and len(kept) >= limit:
            return
        key = base = f"manual_{name}" if isinstance(name, str) else f"manual_tensor_{len(kept)}"
        while key in kept:
            counts[base] += 1
            key = f"{base}_{counts[base]}"
        kept[key] = tensor

    def get_captured_tensors_dict(self) -> OrderedDict[str, torch.Tensor]:
        """All tensors: those of the modules in their order, inputs first, then manual ones."""
        found: OrderedDict[str, torch.Tensor] = OrderedDict()
        for module in self.model_info.modules_to_capture:
            if self.model_info.capture_inputs:
                found.update(self._of(f"{module}.inputs"))
            found.update(self._of(f"{module}.outputs"))
            if module in self.model_info.module_tensors:
                found[module] = self.model_info.module_tensors[module]
        found.update(self.model_info.manual_tensors)
        return found

    def _of(self, prefix: str) -> dict[str, torch.Tensor]:
        """What is captured under a prefix, entries in the order of their numbers."""
        tensors = self.model_info.module_tensors
        return {key: tensors[key] for key in sorted(tensors, key=_natural) if _below(key, prefix)}

    def get_module_tensors(self) -> OrderedDict[str, torch.Tensor]:
        """The tensors of modules."""
        return self.model_info.module_tensors

    def get_manual_tensors(self) -> OrderedDict[str, torch.Tensor]:
        """The tensors that were registered by hand. Those named `moe_auto...` come as one, stacked, `auto_moe_stats.expert_index`."""
        tensors = self.model_info.manual_tensors
        found = OrderedDict((key, tensor) for key, tensor in tensors.items() if _MOE not in key)
        if len(found) < len(tensors):
            found[_MOE_STACKED] = torch.stack([tensor for key, tensor in tensors.items() if _MOE in key])
        return found

    def get_manual_tensor_count(self) -> int:
        """How many tensors were registered by hand."""
        return len(self.model_info.manual_tensors)

    def get_monitored_tensor_count(self) -> int:
        """How many tensors of modules there are."""
        return len(self.model_info.module_tensors)

    def get_total_tensor_count(self) -> int:
        """How many tensors there are."""
        return self.get_monitored_tensor_count() + self.get_manual_tensor_count()

    def remove_hooks(self) -> None:
        """Take the hooks off the model; tensors stay."""
        for hook in self.model_info.hooks:
            hook.remove()
        self.model_info.hooks = []


def _is_of(name: str, module: str) -> bool:
    return name == module or _below(name, f"{module}.inputs") or _below(name, f"{module}.outputs")


def _below(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(f"{prefix}.")


def _natural(key: str) -> list[tuple[int, str]]:
    """Sorts numbers in names by value."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", key)]


def _without_padding(tensor: torch.Tensor, name: str, module: Any) -> torch.Tensor:
    owner, _, rest = name.rpartition(".outputs")
    if "lm_head" not in owner or rest or module is None:
        return tensor
    if getattr(module, "sequence_parallel_enabled", False):
        raise ValueError(
            f"{owner} runs with sequence parallelism: each rank's outputs are those of all tokens only without it. Build the model with "
            f"sequence_parallel_enabled=False to capture {owner}, or leave it out"
        )
    size = getattr(module, "output_size", 0) - getattr(module, "pad_size", 0)
    padded = getattr(module, "pad", False) and not getattr(module, "keep_padded_output", False) and 0 < size < tensor.shape[-1]
    return tensor.narrow(-1, 0, size) if padded else tensor
