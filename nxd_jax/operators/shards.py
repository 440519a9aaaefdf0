"""From places in a rank's part of a dim to places in the whole dim."""

from __future__ import annotations

import torch

from nxd_jax.tensor_parallel import layer_groups, regions
from torch_bridge.mesh import groups
from torch_bridge.mesh.groups import GroupLike


def dims(x: torch.Tensor, dim: int, gather_dim: int) -> tuple[int, int]:
    """Both dims counted from the front. Raises IndexError for one that x has not."""
    for name, given in (("dim", dim), ("gather_dim", gather_dim)):
        if not -x.dim() <= given < x.dim():
            raise IndexError(f"{name}={given} is not a dim of a tensor of shape {list(x.shape)}: use {-x.dim()} to {x.dim() - 1}")
    return dim % x.dim(), gather_dim % x.dim()


def gather_places(places: torch.Tensor, dim: int, part: int, group: GroupLike) -> torch.Tensor:
    """The group's places side by side along dim, each moved by what lies before its rank's part of `part` entries."""
    found = regions.gather_along_dim(places, dim, group)
    before = torch.arange(0, layer_groups.size(group) * part, part, device=found.device).repeat_interleave(places.shape[dim])
    return found + before.reshape([-1 if i == dim else 1 for i in range(found.dim())])


def sub_groups(group: GroupLike, stages: int) -> list[layer_groups.Members]:
    """Groups to gather in one after the other, so that in the end all of `group` have met: neighbours first, of about equal sizes.

    32 ranks in 2 stages: 4 neighbours, then the 8 that are 4 apart. A size that does not divide so has fewer stages.
    """
    whole = groups.resolve(group).members
    found, stride = [], 1
    for count in _factors(len(whole[0]), stages):
        starts = [k for k in range(len(whole[0])) if k // stride % count == 0]
        found.append(layer_groups.Members([[g[k + j * stride] for j in range(count)] for g in whole for k in starts]))
        stride *= count
    return found


def _factors(size: int, stages: int) -> list[int]:
    """At most `stages` factors of a size, as equal as can be, without ones."""
    if stages == 1 or size == 1:
        return [size] if size > 1 else []
    target = size ** (1 / stages)
    first = min((n for n in range(1, size + 1) if size % n == 0), key=lambda n: abs(n - target))
    return ([first] if first > 1 else []) + _factors(size // first, stages - 1)
