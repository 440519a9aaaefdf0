"""`torch.distributed.checkpoint.async_save` of xla tensors: the copies that are written while training goes on.

torch copies a tensor's storage byte by byte into one on the CPU, and xla tensors have none that could be read so. Its function for one tensor is replaced for
them: their values are downloaded, and what is saved is what they were then.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import torch

from torch_bridge.config.late_imports import when_imported
from torch_bridge.recorder.tensor import XLATensor, user_attributes

_WHERE = "torch.distributed.checkpoint._state_dict_stager"


def install() -> None:
    """Called when the first xla tensor of the process is made. Imports nothing of `torch.distributed.checkpoint`."""
    when_imported(_WHERE, _wrap)


def _wrap(module: ModuleType) -> None:
    stager: Any = module.StateDictStager
    original = stager._offload_tensor
    if hasattr(original, "_of_torch"):
        return

    @functools.wraps(original)
    def offload(self: Any, x: torch.Tensor, memo: dict[Any, Any], non_blocking: bool = False) -> torch.Tensor:
        if not isinstance(x, XLATensor):
            found: torch.Tensor = original(self, x, memo, non_blocking=non_blocking)
            return found
        shown = ("values", id(x._storage), x._layout)  # tensors that show the same elements, such as tied weights, share a copy
        if shown not in memo:
            memo[shown] = x.detach().cpu()
            if self.share_memory:
                memo[shown].share_memory_()
        copied: torch.Tensor = memo[shown].detach()
        memo[id(x)] = copied
        for name, value in user_attributes(x).items():
            setattr(copied, name, self.deepcopy_with_tensor_offload(value, memo, non_blocking=non_blocking))
        return copied

    offload._of_torch = original  # type: ignore[attr-defined]
    stager._offload_tensor = offload
