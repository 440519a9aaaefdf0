"""How NxD arranges ranks in groups, under the names that its tests and tools import. `initialize_model_parallel` asks `nxd_jax.topology` instead."""

from __future__ import annotations

import enum
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from nxd_jax.tensor_parallel import grid
from nxd_jax.topology.hardware import hardware

Lists = list[list[int]]

_ROWS = 4
"""Rows of chips in a Trn2 node."""
_RING_OF_ROWS = (0, 3, 1, 2)
_DENSE_WORLD = 64


class ParallelGroups(NamedTuple):
    """What `initialize_model_parallel(mesh_only=True)` returns: the ranks of every group, by kind."""

    tp_groups: Lists
    dp_groups: Lists
    pp_groups: Lists
    ep_model_groups: Lists
    ep_data_groups: Lists
    cp_groups: Lists


def ascending_ring_PG_group(
    lnc_size: int,
    cluster_ranks_nonexp: torch.Tensor,
    cluster_ranks_exp: torch.Tensor,
    tp: int,
    dp: int,
    pp: int,
    ep_model_degree: int,
    ep_data_degree: int,
) -> ParallelGroups:
    """`parallel_state.ascending_ring_PG_group`: groups are the lines of the two grids.

    cluster_ranks_nonexp: ranks by [pp, dp, cp, tp] (or [pp, dp, tp]). cluster_ranks_exp: by [pp, ep_data, ep_model, tp]. The other arguments say so again.
    """
    dense = cluster_ranks_nonexp.reshape(pp, dp, -1, tp).numpy()
    expert = cluster_ranks_exp.reshape(pp, ep_data_degree, ep_model_degree, tp).numpy()
    tp_, dp_, pp_, cp_ = (grid.lines(dense, axis) for axis in (3, 1, 0, 2))
    return ParallelGroups(tp_, dp_, pp_, grid.lines(expert, 2), grid.lines(expert, 1), cp_)


def ascending_descending_ring_PG_group(
    lnc_size: int,
    cluster_ranks_nonexp: torch.Tensor,
    cluster_ranks_exp: torch.Tensor,
    tp: int,
    dp: int,
    pp: int,
    ep_model_degree: int,
    ep_data_degree: int,
) -> ParallelGroups:
    """`parallel_state.ascending_descending_ring_PG_group`: as `ascending_ring_PG_group`, with the rows of chips of each Trn2 node in the order 0, 3, 1, 2.

    Only the order of ranks in `cluster_ranks_nonexp` changes. A node has LOCAL_WORLD_SIZE ranks (64).
    """
    node = int(os.environ.get("LOCAL_WORLD_SIZE", _DENSE_WORLD))
    world = cluster_ranks_nonexp.numel()
    if world % node or node % _ROWS:
        raise ValueError(f"{world} ranks do not fill nodes of LOCAL_WORLD_SIZE={node} ranks in {_ROWS} rows")
    order = np.arange(world).reshape(world // node, _ROWS, -1)[:, _RING_OF_ROWS].reshape(-1)
    dense = torch.from_numpy(order).reshape(cluster_ranks_nonexp.shape)
    return ascending_ring_PG_group(lnc_size, dense, cluster_ranks_exp, tp, dp, pp, ep_model_degree, ep_data_degree)


class PG_Group_Logic(enum.Enum):
    """`parallel_state.PG_Group_Logic`: how ranks are arranged in groups; a member is called as its function. `func`, `description`."""

    LOGIC1 = (ascending_ring_PG_group, "Ascending Ring PG Group")
    LOGIC2 = (ascending_descending_ring_PG_group, "Ascending Descending Ring PG Group")

    def __init__(self, func: Callable[..., ParallelGroups], description: str):
        self.func = func
        self.description = description

    def __call__(self, *args: Any, **kwargs: Any) -> ParallelGroups:
        return self.func(*args, **kwargs)


def get_logic_chosen(lnc_size: int, hardware_type: hardware, tp: int) -> PG_Group_Logic:
    """`parallel_state.get_logic_chosen`: LOGIC2 for tensor parallel groups of half a Trn2 node (tp 64 with lnc 1, tp 32 with lnc 2), else LOGIC1.

    With lnc 2 also LOGIC1 where the world is smaller than a node (64).
    """
    if hardware_type is not hardware.TRN2 or (lnc_size, tp) not in ((1, 64), (2, 32)):
        return PG_Group_Logic.LOGIC1
    if lnc_size == 2 and dist.get_world_size() < _DENSE_WORLD:
        return PG_Group_Logic.LOGIC1
    return PG_Group_Logic.LOGIC2
