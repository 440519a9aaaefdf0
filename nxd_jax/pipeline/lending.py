"""Weights that lie with one process and are read by a stage in another: what belongs to them goes there, for checkpoints with a file for each rank."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from nxd_jax.pipeline.exchange import Exchange
from nxd_jax.pipeline.runtime import Replica
from nxd_jax.pipeline.weights import Homes, ends
from torch_bridge.mesh import messages
from torch_bridge.recorder import placed
from torch_bridge.runtime import executor


@dataclasses.dataclass(frozen=True)
class _OnHost:
    """A CPU tensor in a message."""

    values: np.ndarray
    dtype: torch.dtype


def lend(replicas: Sequence[Sequence[Replica]], homes: Homes, exchange: Exchange, of: Callable[[str], Any]) -> dict[str, Any]:
    """Send what `of(name)` gives for each weight, nested data, to the processes of stages that have a copy of it; what comes here, by the weight's name."""
    found: dict[str, Any] = {}
    for replica in (r for own in replicas for r in own):
        source, target = ends(replica, homes)
        if messages.within_process(source, target):
            continue
        name = f"L {replica.name} {replica.reader}"
        if messages.hosted(source):
            value = pytree.tree_map(_sendable, of(replica.name))
            executor.sync()
            exchange.send(name, 0, value, source, target)
        if replica.copy is not None:
            found[replica.name] = pytree.tree_map(_received, exchange.receive(name, 0, source, target))
    return found


def _sendable(x: Any) -> Any:
    if not isinstance(x, torch.Tensor):
        return x
    if x.device.type == "xla":
        return placed.own(x.detach())
    return _OnHost(x.detach().reshape(-1).contiguous().view(torch.uint8).numpy().reshape(*x.shape, x.element_size()), x.dtype)


def _received(x: Any) -> Any:
    if not isinstance(x, _OnHost):
        return x
    return torch.from_numpy(x.values.copy()).reshape(-1).view(x.dtype).reshape(x.values.shape[:-1])
