"""Who this worker is among the workers of the job. Every rank query and every group of the facades goes through here.

For now a job has one worker. What asks for more raises and says so, so that no script ever computes silently with the wrong world.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any


def size() -> int:
    """Workers in the job."""
    asked = os.environ.get("WORLD_SIZE", "1")
    if asked not in ("", "1"):
        raise NotImplementedError(
            f"this job was started with WORLD_SIZE={asked}, but this release runs one worker per job. "
            "Start it with `python script.py` or `torchrun --nproc_per_node=1`; worlds of several workers come in a later release."
        )
    return 1


def rank() -> int:
    """This worker's number among all workers."""
    size()
    return 0


def local_size() -> int:
    """Workers on this host."""
    size()
    return 1


def local_rank() -> int:
    """This worker's number on its host."""
    size()
    return 0


def process_count() -> int:
    """Python processes in the job."""
    size()
    return 1


def process_index() -> int:
    """This process's number in the job."""
    size()
    return 0


def members(groups: Any = None) -> tuple[int, ...]:
    """The ranks that take part with this one in a collective over `groups`.

    groups: None or empty (all ranks), or a list of lists of ranks, as torch_xla has them. A process group, which NxD's own model code
    passes here by mistake, stands for its ranks. Raises TypeError for anything else and ValueError for ranks that do not exist, appear
    twice or leave this one out.
    """
    everyone = tuple(range(size()))
    if groups is None:
        return everyone
    if hasattr(groups, "_mesh"):
        groups = groups._mesh
    if not isinstance(groups, Sequence) or isinstance(groups, str):
        raise TypeError(f"groups must be a list of lists of ranks such as [[0]], got {groups!r}")
    if not groups:
        return everyone
    seen: set[int] = set()
    mine: tuple[int, ...] | None = None
    for group in groups:
        for member in _ranks(group, groups):
            if member not in everyone:
                raise ValueError(f"groups={groups}: rank {member} does not exist in a world of {len(everyone)} (ranks {list(everyone)})")
            if member in seen:
                raise ValueError(f"groups={groups}: rank {member} appears more than once")
            seen.add(member)
        if rank() in group:
            mine = tuple(group)
    if mine is None:
        raise ValueError(f"groups={groups} leaves out this worker, rank {rank()}: every rank must be in one group")
    return mine


def _ranks(group: Any, groups: Any) -> Sequence[int]:
    if not isinstance(group, Sequence) or isinstance(group, str) or not all(type(m) is int for m in group):
        raise TypeError(f"groups must be a list of lists of ranks such as [[0]], got {groups!r} (one of its groups is {group!r})")
    if not group:
        raise ValueError(f"groups={groups} has an empty group")
    return group
