"""Copies of tensors between the CPU and xla: what `t.to("xla")`, `.cpu()` and reads of values make. Copies are real."""

from __future__ import annotations

from typing import Any

import torch

from torch_bridge.mesh import sharding, world
from torch_bridge.recorder import host_values, uploads
from torch_bridge.recorder.downloads import download, view_of_block
from torch_bridge.recorder.rank_tensor import RankTensor
from torch_bridge.recorder.tensor import XLATensor, copy_storage, make
from torch_bridge.runtime import transfer
from torch_bridge.runtime.session import STATE


def kept(t: torch.Tensor) -> XLATensor | None:
    """Each rank's own values, as a new xla tensor, of a CPU tensor that differs by rank or of an unchanged copy of a value that does; None for any other."""
    return t.uploaded() if type(t) is RankTensor else uploads.remembered(t)


def upload(t: torch.Tensor) -> XLATensor:
    """A new xla tensor with the CPU tensor's values, each rank's own if they differ by rank."""
    transfer._require_strided(t)
    own = kept(t)
    return uploads.upload_plain(t) if own is None else own


def copied(t: XLATensor) -> torch.Tensor:
    """The values of an xla tensor as a new CPU tensor, one that differs by rank where they do. Small integers may come without running the graph."""
    at_hand = _at_hand(t)
    if at_hand is not None:
        return at_hand
    host = download(t)
    array, base = t._storage.array, t._storage.layout
    if array is None or not sharding.active():
        return host
    axes = sharding.axes_of(sharding.spec_of(array))
    if not axes:
        return host
    if len(world.current().hosted) == 1:
        uploads.remember(host, t)
        return host

    view = t._layout  # as it is now: the tensor may be another one when somebody asks, and need not live till then

    def parts() -> list[torch.Tensor]:
        own = [view_of_block(block, base, view) for block in sharding.blocks(array, base.size)]
        return [torch.empty_strided(host.shape, host.stride(), dtype=host.dtype).copy_(x) for x in own]

    return RankTensor.later(host, parts, sharding.ordered(axes))


def _at_hand(t: XLATensor) -> torch.Tensor | None:
    """The values of integers that wait in the segment, if the host can tell them (`host_values`) and nobody follows what is recorded: lengths and orders of
    packed sequences, say."""
    session, view = STATE.session, t._layout
    segment = session.current
    if segment.watch is not None or segment.capture or not session.programs_alone():
        return None  # checks of indices, say, are part of a program
    if view.dtype.is_floating_point or view.dtype.is_complex or not t.is_contiguous():
        return None
    found = host_values.known(segment, t._storage, view)
    return None if found is None else found.reshape(view.size).clone()


def snapshot(x: object) -> Any:
    """An xla tensor with today's value, whatever is written into the original later; anything else as it is."""
    return make(x._layout, copy_storage(x._storage)) if isinstance(x, XLATensor) else x
