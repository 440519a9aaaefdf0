"""Copies of a parameter that begin as one, also where every process drew its own random numbers."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import torch

from nxd_jax.tensor_parallel import full_weights, parallel_groups
from torch_bridge.collectives import functional
from torch_bridge.mesh import groups, world
from torch_bridge.recorder import placed
from torch_bridge.runtime import executor


def make_equal(module: torch.nn.Module) -> None:
    """Give every rank the parameters and buffers of the first rank that holds the same part of the model. Does nothing in a process that hosts all ranks.

    Parts that tensor-parallel or expert-parallel ranks share out are taken from the first rank of their data-parallel group. Of a pipeline's, weights are
    made equal among the ranks of their stage, and buffers, which no stage owns, are left.
    """
    if world.process_count() == 1:
        return
    stages = parallel_groups.size("pp") > 1
    kinds: dict[str, list[torch.Tensor]] = {"all": [], "parts": [], "experts": []}
    for t in _unique(itertools.chain(module.parameters(), module.buffers())):
        if t.device.type == "xla" and not (stages and placed.place_of(t) is None):
            kinds[_kind(t)].append(t)
    among: dict[str, list[Any]] = {
        "all": [parallel_groups.lists(kind) for kind in ("tp", "cp", "dp")] if stages else [None],
        "parts": [parallel_groups.lists("cp"), parallel_groups.lists("dp")],
        "experts": [parallel_groups.lists("edp")],
    }
    for kind, tensors in kinds.items():
        for ranks in among[kind]:
            found = groups.resolve(ranks)
            if found.size > 1:
                functional.broadcast_from(tensors, 0, found)
    executor.sync()


def _kind(t: torch.Tensor) -> str:
    if getattr(t, "expert_model_parallel", False) and parallel_groups.size("ep") > 1:
        return "experts"
    return "parts" if full_weights.is_shared_out(t) else "all"


def _unique(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return list({id(t): t for t in tensors}.values())
