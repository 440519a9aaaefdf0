"""`tensor.split(n)[rank]`: the pieces of an xla tensor, indexed with a number that differs by rank.

Python asks a number for one index, and would get the first hosted rank's. So once there are such numbers, the functions that cut tensors return a
tuple that gives each rank its own piece.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from torch_bridge import ranks
from torch_bridge.tensor import XLATensor

_NAMES = ("split", "chunk", "unbind", "tensor_split", "split_with_sizes", "hsplit", "vsplit", "dsplit", "unsafe_split", "unsafe_chunk")


class Pieces(tuple[torch.Tensor, ...]):
    """A tuple of pieces. Indexed with each rank's own number it gives each rank its own piece (a copy, so that it cannot be written through)."""

    def __getitem__(self, index: Any) -> Any:
        values = ranks.values_of(index)
        if values is None:
            found = tuple.__getitem__(self, index)
            return Pieces(found) if isinstance(index, slice) else found
        shapes = {tuple(p.shape) for p in self}
        if len(shapes) != 1:
            raise RuntimeError(f"pieces of different shapes {sorted(shapes)} cannot be indexed with a rank: all ranks need one shape")
        return torch.stack(list(self))[index]


def _wrapped(original: Any) -> Any:
    @functools.wraps(original)
    def cut(*args: Any, **kwargs: Any) -> Any:
        found = original(*args, **kwargs)
        if isinstance(found, (tuple, list)) and found and isinstance(found[0], XLATensor):
            return Pieces(found)
        return found

    return cut


@functools.cache
def install() -> None:
    """Let the functions that cut tensors return `Pieces` for xla tensors."""
    for name in _NAMES:
        for owner in (torch, torch.Tensor):
            if hasattr(owner, name):
                setattr(owner, name, _wrapped(getattr(owner, name)))
