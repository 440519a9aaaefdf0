"""How long a pipeline's training step would take: programs by a roofline, what ranks wait by the schedule."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from nxd_jax.inspect.collectives import Collective
from nxd_jax.inspect.estimate import Constants, Work, estimate, program_work
from nxd_jax.inspect.estimate.work import Phase
from nxd_jax.inspect.stages import NAMES, Piece
from nxd_jax.inspect.traffic import Groups
from nxd_jax.pipeline import schedules
from nxd_jax.pipeline.schedules import Kind, Timeline, Times
from nxd_jax.pipeline.step_log import StepLog
from nxd_jax.topology import Topology

Seconds = Callable[[Work], float]


def timeline(log: StepLog, found: Sequence[Piece], seconds: Seconds, axes: Mapping[str, int], dtype: str) -> Timeline:
    """When each computation of a step would run. seconds: what work takes."""
    assert log.schedule is not None
    known: dict[str, float] = {}
    of_stage: dict[tuple[int, Kind], float] = {}
    for piece in found:
        if piece.task is not None:
            if piece.structure not in known:
                known[piece.structure] = seconds(_work(piece, axes, dtype))
            of_stage[piece.task] = of_stage.get(piece.task, 0.0) + piece.runs * known[piece.structure]
    counts = Counter((action.stage, action.kind) for order in log.schedule.orders for action in order)
    transfer = _transfer(log, seconds, axes)
    each = [{kind: of_stage.get((stage, kind), 0.0) / (counts[stage, kind] or 1) for kind in Kind} for stage in range(log.schedule.stages)]
    when = schedules.run(log.schedule, [_times(of_kind, transfer) for of_kind in each])
    assert isinstance(when, Timeline), log.schedule.name
    return when


def _times(of: Mapping[Kind, float], transfer: float) -> Times:
    """Of a stage, from the seconds of each kind. A schedule with both whole backward passes and parts of them has those as long as their parts."""
    parts = of[Kind.INPUT_BACKWARD], of[Kind.WEIGHT_BACKWARD]
    first, second = parts if any(parts) else (of[Kind.BACKWARD], 0.0)
    return Times(of[Kind.FORWARD], first, second, transfer)


def _transfer(log: StepLog, seconds: Seconds, axes: Mapping[str, int]) -> float:
    """From the end of a computation until another rank has its result: that of the largest message."""
    assert log.schedule is not None
    each = max((size / count for count, size in log.sent.values()), default=0.0)
    ranks = axes.get("pp", 1)
    if not each or ranks < 2:
        return 0.0
    return seconds(Work("", dict(axes), (), (Collective("permute", ("pp",), ranks, 1, round(each)),)))


def _work(piece: Piece, axes: Mapping[str, int], dtype: str) -> Work:
    return program_work(piece.inspection.costs, piece.inspection.collectives, axes, dtype=dtype)


def step_work(
    log: StepLog,
    found: Sequence[Piece],
    axes: Mapping[str, int],
    *,
    name: str,
    dtype: str,
    sequences: int,
    topology: Topology,
    constants: Constants,
    groups: Groups,
) -> Work:
    """The work of a core of the rank that computes longest, whose idle time is that of the schedule. What is outside of the passes counts once, after them."""
    when = timeline(log, found, lambda work: estimate(work, topology, constants=constants, groups=groups).seconds, axes, dtype)
    ranks = range(when.schedule.ranks)
    busiest = max(ranks, key=lambda rank: when.end - when.idle(rank))
    busy = when.end - when.idle(busiest)
    inside = [p for p in found if p.task is not None and when.schedule.placement[p.task.stage] == busiest]
    outside = [p for p in found if p.rank in (busiest, None) and p.task is None]
    return Work(
        name=name,
        axes=dict(axes),
        phases=_phases(inside, dtype),
        collectives=_collectives(inside),
        update=_phases(outside, dtype),
        reductions=_collectives(outside),
        stages=when.schedule.ranks,
        microbatches=when.schedule.microbatches,
        sequences=sequences,
        schedule_bubble=when.idle(busiest) / busy if busy else 0.0,
    )


def _phases(found: Sequence[Piece], dtype: str) -> tuple[Phase, ...]:
    return tuple(
        Phase(NAMES[p.kind], p.runs * r.flops, p.runs * r.other, p.runs * r.bytes, dtype) for p in found for r in p.inspection.costs.rows
    )


def _collectives(found: Sequence[Piece]) -> tuple[Collective, ...]:
    return tuple(
        Collective(c.kind, c.axes, c.ranks, p.runs * c.count, p.runs * c.bytes, c.dtype) for p in found for c in p.inspection.collectives
    )
