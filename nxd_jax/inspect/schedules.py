"""Pipeline schedules without a model: how long each rank is idle, how many activations it keeps, and a picture of the step."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nxd_jax.inspect import timeline_text
from nxd_jax.inspect.tables import Column, Table
from nxd_jax.pipeline import schedules
from nxd_jax.pipeline.schedules import EQUAL, Schedule, ScheduleError, Times

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class RankOfSchedule:
    """What a rank does in a step.

    Attributes:
        rank: the pipeline rank.
        stages: the stages that it holds.
        busy: how long it computes, in the unit of the given times.
        idle: how long it does nothing within the whole step.
        waiting: how long of that it waits between its own first and last computation.
        peak: most micro-batches whose activations it keeps at a time, each counted once for each stage that keeps them.
    """

    rank: int
    stages: tuple[int, ...]
    busy: float
    idle: float
    waiting: float
    peak: int


class ScheduleTable(Table[RankOfSchedule]):
    """A row for each rank; `timeline` says when each computation runs, `picture()` draws it, and `print` shows it as text below the table."""

    def __init__(self, timeline: schedules.Timeline):
        self.timeline = timeline
        plan = timeline.schedule
        rows = [
            RankOfSchedule(
                rank,
                plan.stages_of(rank),
                timeline.end - timeline.idle(rank),
                timeline.idle(rank),
                timeline.waiting(rank),
                timeline.peak(rank),
            )
            for rank in range(plan.ranks)
        ]
        columns = [
            Column("rank", "rank", number=True),
            Column("stages", "stages", lambda stages: ", ".join(map(str, stages))),
            Column("busy", "busy", "{:g}".format, number=True),
            Column("idle", "idle", "{:g}".format, number=True),
            Column("waiting", "waiting", "{:g}".format, number=True),
            Column("most activations", "peak", number=True),
        ]
        title = f"Schedule {plan.name}: {plan.stages} stages on {plan.ranks} ranks, {plan.microbatches} micro-batches"
        note = f"A step takes {timeline.end:g}, of which ranks are idle {timeline.idle_share:.1%}."
        super().__init__(title, rows, columns, note)

    def text(self, width: int | None = None) -> str:
        """The step as lines of text, one for each rank. width: characters that a line may have; default: those of the terminal."""
        return timeline_text.text(self.timeline, width)

    def __str__(self) -> str:
        return f"{super().__str__()}\n\n{self.text()}"

    def picture(self, path: str | os.PathLike[str] | None = None, until: float | None = None) -> Figure:
        """The step as a `matplotlib.figure.Figure` (`nxd_jax.inspect.schedule_picture`)."""
        from nxd_jax.inspect.pictures.schedule import schedule_picture

        return schedule_picture(self.timeline, path, until)


def schedule(
    which: str | Schedule,
    stages: int | None = None,
    microbatches: int | None = None,
    chunks: int | None = None,
    times: Times | Sequence[Times] = EQUAL,
) -> ScheduleTable:
    """What a pipeline schedule costs: `print(inspect.schedule("zbv", stages=8, microbatches=32))`.

    Args:
        which: a name (`nxd_jax.pipeline.schedules.KINDS`), or a schedule of one's own (`schedules.from_orders`, `schedules.from_csv`).
        stages: stages of all ranks together; a rank has `chunks` of them.
        microbatches: NxD's num_microbatches.
        chunks: NxD's virtual_pipeline_size; default: the fewest that the schedule has (1, or 2 where it needs several).
        times: what one stage takes for one micro-batch; of all stages, or of each (`PipelineStep.times`).

    Raises ScheduleError for a schedule that cannot be run, or for numbers that it does not allow.
    """
    if isinstance(which, Schedule):
        if (stages, microbatches, chunks) != (None, None, None):
            raise ScheduleError(
                f"the schedule {which.name} has its own numbers of stages and micro-batches: leave out stages, microbatches and chunks"
            )
        plan = which
    else:
        if stages is None or microbatches is None:
            raise ScheduleError(f"say how many stages and micro-batches: schedule({which!r}, stages=8, microbatches=32)")
        own = schedules.KINDS[schedules.find(which)].chunks if chunks is None else chunks
        if own < 1 or stages % own:
            raise ScheduleError(f"stages={stages} is not a multiple of the {own} stages that each rank has: change stages or chunks")
        plan = schedules.make(which, stages // own, microbatches, own)
    if isinstance(times, Sequence) and len(times) != plan.stages:
        raise ScheduleError(
            f"times has {len(times)} entries, and the schedule {plan.name} has {plan.stages} stages: give one for each, or one for all"
        )
    return ScheduleTable(schedules.check(plan, times=times))
