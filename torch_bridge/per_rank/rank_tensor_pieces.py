"""`tensor.split(n)[rank]`: the pieces of a tensor, indexed with a number that differs by rank.

Python asks a number for one index, and would get the first hosted rank's. So once there are such numbers, the functions that cut tensors return a
tuple that gives each rank its own piece.
"""

from __future__ import annotations

import functools
import operator
from typing import Any

import torch

from torch_bridge.mesh import rank_numbers, world
from torch_bridge.per_rank import rank_functions

_NAMES = ("split", "chunk", "unbind", "tensor_split", "split_with_sizes", "hsplit", "vsplit", "dsplit", "unsafe_split", "unsafe_chunk")


class Pieces(tuple[torch.Tensor, ...]):
    """A tuple of pieces. Indexed with each rank's own number it gives each rank its own piece (which cannot be written through); a slice
    between such numbers (`pieces[rank::n]`) gives as many pieces, each rank's own."""

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return Pieces(self._slice(index))
        values = rank_numbers.values_of(index)
        if values is None:
            return tuple.__getitem__(self, index)
        shapes = {tuple(p.shape) for p in self}
        if len(shapes) != 1:
            raise RuntimeError(f"pieces of different shapes {sorted(shapes)} cannot be indexed with a rank: all ranks need one shape")
        if not any(p.requires_grad or p.device.type != "cpu" for p in self):
            return rank_functions.compute(operator.getitem, (tuple(self), index), {})
        return torch.stack(list(self))[index]

    def _slice(self, index: slice) -> Any:
        ends = (index.start, index.stop, index.step)
        if not any(map(rank_numbers.is_ranked, ends)):
            return tuple.__getitem__(self, index)
        chosen = [range(len(self))[slice(*own)] for own in zip(*map(rank_numbers.per_rank, ends), strict=True)]
        if len(set(map(len, chosen))) > 1:
            raise RuntimeError(f"ranks would get different numbers of pieces, {list(map(len, chosen))}: all need the same")
        whole = torch.stack(list(self)) if chosen[0] else self
        return [whole[world.current().table([places[k] for places in chosen].__getitem__)] for k in range(len(chosen[0]))]


def _wrapped(original: Any) -> Any:
    @functools.wraps(original)
    def cut(*args: Any, **kwargs: Any) -> Any:
        found = original(*args, **kwargs)
        if isinstance(found, (tuple, list)) and found and isinstance(found[0], torch.Tensor):
            return Pieces(found)
        return found

    return cut


@functools.cache
def install() -> None:
    """Let the functions that cut tensors return `Pieces`."""
    for name in _NAMES:
        for owner in (torch, torch.Tensor):
            if hasattr(owner, name):
                rank_functions.replace(owner, name, _wrapped(getattr(owner, name)))
