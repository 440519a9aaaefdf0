"""Saving shards: one file for each rank, also from a process that hosts several."""

from __future__ import annotations

import os
from typing import Any

import torch

from torch_bridge import nested
from torch_bridge.collectives import object_collectives
from torch_bridge.fsdp.state import is_shard
from torch_bridge.mesh import world
from torch_bridge.per_rank import rank_paths


def needed(data: Any) -> bool:
    """Whether nested data has shards, or their metadata, of several ranks that this process hosts."""
    if len(world.current().hosted) == 1:
        return False
    return _has_metadata(data) or bool(nested.collect(data, is_shard))


def save(data: Any, path: str | os.PathLike[str]) -> None:
    """`torch.save` each rank's own values of the data, tensors on the CPU, in its own file. path: the first hosted rank's.

    Raises ValueError for an open file, or where the path does not have the rank's number (`rank_paths`).
    """
    if not isinstance(path, (str, os.PathLike)):
        raise ValueError(
            f"xm.save: shards of several ranks go to a file for each, so pass a path with the rank's number, not a {type(path).__name__}"
        )
    hosted = list(world.current().hosted)
    paths = rank_paths.of_ranks(path, hosted[0], hosted)
    for target, own in zip(paths, object_collectives.each_ranks(data), strict=True):
        torch.save(own, target)


def _has_metadata(data: Any) -> bool:
    if isinstance(data, dict):
        return {"shard_info", "world_size", "rank"} <= data.keys() or any(map(_has_metadata, data.values()))
    return isinstance(data, (list, tuple)) and any(map(_has_metadata, data))
