"""Whether a schedule can be run and computes every gradient once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from nxd_jax.pipeline.schedules import simulate
from nxd_jax.pipeline.schedules.actions import Action, Kind, backward, forward, input_backward, weight_backward
from nxd_jax.pipeline.schedules.schedule import Schedule, ScheduleError
from nxd_jax.pipeline.schedules.simulate import EQUAL, Times


def check(
    schedule: Schedule,
    microbatches: int | None = None,
    placement: tuple[int, ...] | None = None,
    times: Times | Sequence[Times] = EQUAL,
) -> simulate.Timeline:
    """Raise ScheduleError if a schedule loses or repeats an action, has one on a rank that does not hold its stage, or deadlocks; its text names the action.

    microbatches, placement: what the model is run with, if it is known; default: the schedule's own. Returns the timeline with these
    times (of all stages, or of each).
    """
    if microbatches is not None and microbatches != schedule.microbatches:
        raise _error(schedule, f"is for {schedule.microbatches} micro-batches, and the step has num_microbatches={microbatches}")
    if placement is not None and placement != schedule.placement:
        raise _error(schedule, f"has its stages on ranks {list(schedule.placement)}, and the model has them on {list(placement)}")
    _check_places(schedule)
    _check_counts(schedule)
    found = simulate.run(schedule, times)
    if isinstance(found, simulate.Stuck):
        raise _error(schedule, f"deadlocks: {_circle(schedule, found)}")
    return found


def _error(schedule: Schedule, what: str) -> ScheduleError:
    return ScheduleError(f"the pipeline schedule {schedule.name} {what}")


def _check_places(schedule: Schedule) -> None:
    for rank, order in enumerate(schedule.orders):
        for action in order:
            if not 0 <= action.stage < schedule.stages:
                raise _error(schedule, f"has {action} on rank {rank}, but there are only {schedule.stages} stages")
            if not 0 <= action.microbatch < schedule.microbatches:
                raise _error(schedule, f"has {action} on rank {rank}, but there are only {schedule.microbatches} micro-batches")
            if schedule.placement[action.stage] != rank:
                raise _error(
                    schedule, f"has {action} on rank {rank}, but stage {action.stage} is on rank {schedule.placement[action.stage]}"
                )


def _check_counts(schedule: Schedule) -> None:
    times = Counter(action for order in schedule.orders for action in order)
    repeated = next((action for action, count in times.items() if count > 1), None)
    if repeated is not None:
        raise _error(schedule, f"repeats {repeated}: {times[repeated]} times on rank {schedule.placement[repeated.stage]}")
    for stage in range(schedule.stages):
        for microbatch in range(schedule.microbatches):
            _check_one(schedule, times, stage, microbatch)


def _check_one(schedule: Schedule, times: Counter[Action], stage: int, microbatch: int) -> None:
    rank = schedule.placement[stage]
    if not times[forward(stage, microbatch)]:
        raise _error(schedule, f"lacks {forward(stage, microbatch)} on rank {rank}")
    whole, parts = backward(stage, microbatch), [input_backward(stage, microbatch), weight_backward(stage, microbatch)]
    there = [part for part in parts if times[part]]
    if times[whole] and there:
        raise _error(schedule, f"has both {whole} and {there[0]} on rank {rank}: a backward pass is whole (B) or in two parts (I, W)")
    if not times[whole] and len(there) < 2:
        missing = next(part for part in parts if part not in there) if there else whole
        raise _error(schedule, f"lacks {missing} on rank {rank}")


def _circle(schedule: Schedule, stuck: simulate.Stuck) -> str:
    """The ranks that wait for each other, each with what it waits for."""
    rank = next(iter(stuck.waits))
    seen: list[int] = []
    while rank not in seen:
        seen.append(rank)
        rank = schedule.placement[stuck.waits[rank][1].stage]
    circle = seen[seen.index(rank) :]
    said = [f"rank {one} is at {stuck.waits[one][0]} and waits for {_waited(stuck.waits[one][1])}" for one in circle]
    if len(circle) == 1:
        return f"{said[0]}, which comes later in its own order"
    return "; ".join(said) + ". Each comes later in the order of its rank"


def _waited(action: Action) -> str:
    if action.kind is Kind.BACKWARD:
        return f"{action} (or {action._replace(kind=Kind.INPUT_BACKWARD)})"
    return str(action)
