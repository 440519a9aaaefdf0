"""Which tensors are gradients of shards, for functions that are given gradients alone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

if TYPE_CHECKING:
    import torch

    from torch_bridge.mesh.groups import Groups

_SHARDS: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""Every shard of this process, as long as it lives, with the ranks that have the other parts."""


def add(shard: nn.Parameter, among: Groups) -> None:
    """Know a shard, and the ranks that parts of the parameter are shared out among."""
    _SHARDS[shard] = among


def of(grads: Iterable[torch.Tensor]) -> list[Groups | None]:
    """For each tensor who has the other parts, if it is the gradient of a shard (`shard.grad` itself); else None."""
    known = {id(grad): among for shard, among in _SHARDS.items() if (grad := shard.grad) is not None}
    return [known.get(id(t)) for t in grads]
