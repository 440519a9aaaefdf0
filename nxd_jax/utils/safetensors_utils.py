"""`neuronx_distributed.utils.safetensors_utils`: state dicts as safetensors takes them."""

from __future__ import annotations

import torch


def remove_duplicate_tensors(checkpoint: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Keep one name of each tensor that a state dict holds under several (tied weights), the first by the alphabet; in place, and returned.

    Tensors that share only part of their memory stay: they differ. Tensors without memory of their own (on "meta", empty) stay, too.
    """
    kept: set[object] = set()
    for name in sorted(checkpoint):
        tensor = checkpoint[name]
        key = _memory(tensor)
        if key is not None and key in kept:
            del checkpoint[name]
        kept.add(key)
    return checkpoint


def _memory(tensor: torch.Tensor) -> object:
    """What two names of one tensor have in common."""
    if tensor.is_meta or not tensor.numel():
        return None
    return tensor.device, tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype
