"""Tensors that differ among ranks, for those who make or read them: one tensor per rank in, one per rank out.

`torch_bridge.varying(t)` says how a tensor lies on the mesh.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from torch_bridge.mesh import groups, sharding, world
from torch_bridge.mesh.groups import Groups
from torch_bridge.recorder.downloads import each_ranks
from torch_bridge.recorder.rank_tensor import RankTensor
from torch_bridge.recorder.uploads import from_ranks, remembered, remembers
from torch_bridge.recorder.varying import Varying, note_file, varying

__all__ = ["Varying", "axes_of", "expect", "from_ranks", "note_file", "of_each", "shards", "varying"]


def shards(t: torch.Tensor) -> list[torch.Tensor]:
    """Every hosted rank's own value, as CPU tensors in rank order, of an xla tensor (which runs what is pending) or a copy of one on the CPU."""
    return list(t.parts) if isinstance(t, RankTensor) else each_ranks(t)


def of_each(t: torch.Tensor) -> list[torch.Tensor] | None:
    """Every hosted rank's own value, as CPU tensors in rank order, of a tensor wherever it is; None for a plain CPU tensor, which all have."""
    if t.device.type == "xla" or isinstance(t, RankTensor):
        return shards(t)
    source = remembered(t) if remembers(t) else None
    return None if source is None else each_ranks(source)


def expect(t: torch.Tensor, axes: Iterable[str] | sharding.Cuts, dim: int = 0) -> None:
    """Declare that ranks hold different parts of a tensor along these axes (a tensor-parallel weight), side by side along `dim` in the global array.

    axes: for parts along several dims (experts, and parts of each), a dict from dim to axes. Updates that differ along them are then no drift.
    """
    if sharding.active():
        t._storage.describe(spec=sharding.spec_for(axes, dim))  # type: ignore[attr-defined]


def axes_of(among: Groups | Any) -> tuple[str, ...]:
    """The mesh axes that groups run along; all axes if they are no lines of the mesh."""
    found = among if isinstance(among, Groups) else groups.resolve(among)
    return tuple(world.current().axes) if found.axes is None else found.axes
