"""Saving what differs by rank: one file for each rank, also from a process that hosts several."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Any

import torch

from torch_bridge import nested
from torch_bridge.collectives import object_collectives
from torch_bridge.fsdp import naming
from torch_bridge.mesh import world
from torch_bridge.per_rank import rank_paths
from torch_bridge.recorder import sharded
from torch_bridge.runtime import whole_files


def needed(data: Any, path: Any) -> bool:
    """Whether nested data is to be saved in a file for each of several ranks that this process hosts: it has shards of a wrapper, or tensors (of its optimizer)
    that differ by rank and go to a path with the rank's number."""
    if len(world.current().hosted) == 1:
        return False
    if has_shards(data):
        return True
    with contextlib.suppress(ValueError, TypeError):
        _paths(path)
        return any(sharded.varying(t).axes for t in nested.collect(data, _on_xla))
    return False


def save(data: Any, path: Any, write: Callable[[Any, str], None] = whole_files.save) -> None:
    """Write each rank's own values of the data, tensors on the CPU, in its own file. path: the first hosted rank's.

    Raises TypeError for an open file, ValueError where the path does not have the rank's number (`rank_paths`).
    """
    for target, own in zip(_paths(path), object_collectives.each_ranks(data), strict=True):
        write(own, target)


def _paths(path: Any) -> list[str]:
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(
            f"xm.save: shards of several ranks go to a file for each, so pass a path with the rank's number, not a {type(path).__name__}"
        )
    hosted = list(world.current().hosted)
    return rank_paths.of_ranks(path, hosted[0], hosted)


def _on_xla(x: object) -> bool:
    return isinstance(x, torch.Tensor) and x.device.type == "xla"


def has_shards(data: Any) -> bool:
    """Whether there is a wrapper's state dict or shard metadata in it."""
    if isinstance(data, dict):
        if {"shard_info", "world_size", "rank"} <= data.keys():
            return True
        return any((isinstance(k, str) and naming.unit_and_shard(k) is not None) or has_shards(v) for k, v in data.items())
    return isinstance(data, (list, tuple)) and any(map(has_shards, data))
