"""Schedules whose backward passes are whole: GPipe, 1F1B, looped breadth-first, and interleaved 1F1B.

Each function gives the orders by rank. P: ranks, v: chunks (stages per rank), M: micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable

from nxd_jax.pipeline.schedules.actions import Action, backward, forward
from nxd_jax.pipeline.schedules.schedule import ScheduleError


def gpipe(ranks: int, chunks: int, microbatches: int) -> list[list[Action]]:
    """All forward passes, then all backward passes. Idle (P-1)(F+B), peak M."""
    every = range(microbatches)
    return [[forward(rank, m) for m in every] + [backward(rank, m) for m in every] for rank in range(ranks)]


def one_f_one_b(ranks: int, chunks: int, microbatches: int) -> list[list[Action]]:
    """NxD's Train1F1BSchedule: one forward pass, one backward pass in turn, as soon as there is something to go back. Idle (P-1)(F+B), peak min(P-r, M)."""
    return in_turn(ranks, chunks, microbatches, 1, backward)


def looped_bfs(ranks: int, chunks: int, microbatches: int) -> list[list[Action]]:
    """Stage by stage all forward passes, then in reverse all backward passes. Idle (P-1)(F+B)/v, peak v*M."""
    every = range(microbatches)
    orders = []
    for rank in range(ranks):
        stages = range(rank, ranks * chunks, ranks)
        orders.append([forward(s, m) for s in stages for m in every] + [backward(s, m) for s in reversed(stages) for m in reversed(every)])
    return orders


def interleaved(ranks: int, chunks: int, microbatches: int) -> list[list[Action]]:
    """1F1B over several chunks: groups of P micro-batches go through all chunks of a rank. Idle (P-1)(F+B)/v, peak (v-1)P + 2(P-1-r) + 1, at most vM."""
    return in_turn(ranks, chunks, microbatches, 2, backward)


def in_turn(ranks: int, chunks: int, microbatches: int, lead: int, back: Callable[[int, int], Action]) -> list[list[Action]]:
    """Forward passes until the first micro-batch is back, then one forward and one backward pass in turn, then the backward passes that are left.

    With several chunks a group of micro-batches goes through a chunk before the next chunk's turn. lead: how many forward passes more a rank does before it
    turns back than the rank after it. back: makes a backward pass, or the part of it for the input.
    """
    group = group_size(ranks, microbatches) if chunks > 1 else microbatches
    firsts = range(0, microbatches, group)
    ahead = [(chunk, first + m) for first in firsts for chunk in range(chunks) for m in range(group)]
    behind = [(chunk, first + m) for first in firsts for chunk in reversed(range(chunks)) for m in range(group)]
    orders = []
    for rank in range(ranks):
        forwards = [forward(chunk * ranks + rank, m) for chunk, m in ahead]
        backwards = [back(chunk * ranks + rank, m) for chunk, m in behind]
        warm_up = min((chunks - 1) * group + lead * (ranks - 1 - rank), len(forwards))
        order, steady = forwards[:warm_up], forwards[warm_up:]
        for pair in zip(steady, backwards, strict=False):
            order += pair
        orders.append(order + backwards[len(steady) :])
    return orders


def group_size(ranks: int, microbatches: int) -> int:
    """How many micro-batches go through a chunk before the next chunk's turn. Raises ScheduleError if they do not come out even."""
    groups = max(1, microbatches // ranks)
    if microbatches % groups:
        below = ranks * (microbatches // ranks)
        raise ScheduleError(
            f"{microbatches} micro-batches do not make {groups} equal groups, in which an interleaved schedule of {ranks} ranks takes them: set "
            f"num_microbatches to a multiple of {ranks}, such as {below} or {below + ranks}, or virtual_pipeline_size=1"
        )
    return microbatches // groups
