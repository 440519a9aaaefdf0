"""What is known of a measured step of a pipeline: the simulated timeline, and tables of ranks, stages and computations."""

from __future__ import annotations

import functools
import os
import statistics
from typing import TYPE_CHECKING

from nxd_jax.inspect import timeline_text, units
from nxd_jax.inspect.tables import Column, Table
from nxd_jax.inspect.timeline_measured import Measured, RankOfStep, StageOfStep, TaskOfStep
from nxd_jax.inspect.timeline_memory import Memory, peak
from nxd_jax.pipeline import schedules
from nxd_jax.pipeline.schedules import Action, Kind, Schedule, Timeline, Times

if TYPE_CHECKING:
    from matplotlib.figure import Figure

METHOD = (
    "Measured: how long the devices took for each computation, which ran alone on this machine{}, and the arrays that were there after it. Simulated: when "
    "each would start and end if every rank had such a machine to itself, in the order of the schedule, with transfers that take no time. Bytes are those of a "
    "rank's first core between computations; what a program needs only while it runs (inspect.look().memory) comes on top."
)


class PipelineStep:
    """A measured step (`inspect.pipeline`), there when a training step of the block has ended. Prints as a table and as lanes.

    Its parts raise ValueError before.

    Attributes:
        schedule: of the model; None before its first step.
    """

    def __init__(self) -> None:
        self.schedule: Schedule | None = None
        self._taken: Measured | None = None

    @property
    def done(self) -> bool:
        """Whether a step has been measured."""
        return self._taken is not None

    def take(self, found: Measured) -> None:
        """What was measured, together with what there is of the same model and shapes."""
        for name in ("timeline", "plan", "memory"):
            self.__dict__.pop(name, None)
        self._taken = found if self._taken is None else self._taken.also(found)

    @property
    def measured(self) -> Measured:
        """Seconds and arrays as they were measured."""
        if self._taken is None:
            raise ValueError("no training step of the pipeline has ended in this block: call model.run_train(...) in it")
        return self._taken

    @functools.cached_property
    def timeline(self) -> Timeline:
        """The step with the measured durations, simulated."""
        return self._run(self.measured.seconds)

    @functools.cached_property
    def plan(self) -> Timeline:
        """The step if all stages took the same: the means of what was measured, by kind of computation."""
        found = self.measured.seconds
        mean = {kind: statistics.fmean(own) for kind in Kind if (own := [s for action, s in found.items() if action.kind is kind])}
        return self._run({action: mean[action.kind] for action in found})

    @functools.cached_property
    def memory(self) -> Memory:
        """What ranks keep over time."""
        return Memory(self.measured, self.timeline)

    def _run(self, durations: dict[Action, float]) -> Timeline:
        found = schedules.run(self.measured.schedule, durations=durations)
        assert isinstance(found, Timeline)
        return found

    @property
    def seconds(self) -> float:
        """How long the simulated step takes."""
        return self.timeline.end

    @property
    def idle_share(self) -> float:
        """The share of all ranks' time in which they do nothing, in the simulated step."""
        return self.timeline.idle_share

    @property
    def times(self) -> list[Times]:
        """By stage, medians for `inspect.schedule(..., times=step.times)`. Of a backward pass that is whole each part counts half."""
        found = []
        for row in self.stages:
            half = (row.backward or 0.0) / 2
            parts = (half if own is None else own for own in (row.input_backward, row.weight_backward))
            found.append(Times(row.forward or 0.0, *parts))
        return found

    # -- tables ---------------------------------------------------------------------------------------

    @property
    def ranks(self) -> Table[RankOfStep]:
        """A row for each rank."""
        columns = [
            Column("rank", "rank", number=True),
            Column("stages", "stages", lambda stages: ", ".join(map(str, stages))),
            *(Column(name, name, units.seconds, number=True) for name in ("busy", "idle", "waiting")),
            Column("most activations", "peak", number=True),
            Column("planned", "planned_peak", number=True),
            Column("their memory", "activation_bytes", units.size, number=True),
            Column("before the step", "held_bytes", units.size, number=True),
            Column("peak memory", "peak_bytes", units.size, number=True),
        ]
        return Table(self._title(), [self._rank(rank) for rank in range(self.measured.schedule.ranks)], columns, self._note())

    def _rank(self, rank: int) -> RankOfStep:
        timeline, memory = self.timeline, self.memory
        return RankOfStep(
            rank=rank,
            stages=timeline.schedule.stages_of(rank),
            busy=timeline.end - timeline.idle(rank),
            idle=timeline.idle(rank),
            waiting=timeline.waiting(rank),
            peak=peak(memory.live(rank)),
            planned_peak=timeline.peak(rank),
            activation_bytes=peak(memory.activations(rank)),
            held_bytes=memory.held(rank),
            peak_bytes=peak(memory.all(rank)),
        )

    def _title(self) -> str:
        plan = self.measured.schedule
        return f"Step of a pipeline by {plan.name}: {plan.stages} stages on {plan.ranks} ranks, {plan.microbatches} micro-batches"

    def _note(self) -> str:
        found = self.measured
        host = statistics.fmean(found.host_seconds.values())
        notes = [
            f"The simulated step takes {units.seconds(self.seconds)}, of which ranks are idle {self.idle_share:.1%}; {self.plan.idle_share:.1%} if all stages "
            f"took the same. Python needs {units.seconds(host)} to record and dispatch a computation.",
            *([f"{units.many(found.compiled, 'program')} compiled in this step: measure another one."] * bool(found.compiled)),
            METHOD.format(f" (the least of {found.steps} steps)" * (found.steps > 1)),
        ]
        return "\n".join(notes)

    @property
    def stages(self) -> Table[StageOfStep]:
        """A row for each stage: what it takes for a micro-batch."""
        placement = self.measured.schedule.placement
        rows = [self._stage(stage, rank) for stage, rank in enumerate(placement)]
        kinds = ("forward", "backward", "input_backward", "weight_backward")
        columns = [
            Column("stage", "stage", number=True),
            Column("rank", "rank", number=True),
            *(
                Column(name.replace("_", " "), name, units.seconds, number=True)
                for name in kinds
                if any(getattr(row, name) is not None for row in rows)
            ),
            Column("keeps of a micro-batch", "activation_bytes", units.size, number=True),
        ]
        return Table("Stages: medians over micro-batches", rows, columns)

    def _stage(self, stage: int, rank: int) -> StageOfStep:
        taken: dict[Kind, list[float]] = {}
        for action, seconds in self.measured.seconds.items():
            if action.stage == stage:
                taken.setdefault(action.kind, []).append(seconds)
        middle = {kind: statistics.median(found) for kind, found in taken.items()}
        return StageOfStep(
            stage,
            rank,
            middle.get(Kind.FORWARD),
            middle.get(Kind.BACKWARD),
            middle.get(Kind.INPUT_BACKWARD),
            middle.get(Kind.WEIGHT_BACKWARD),
            self.memory.of_micro_batch(stage),
        )

    @property
    def tasks(self) -> Table[TaskOfStep]:
        """A row for each computation, by the time at which it starts."""
        found = self.measured
        rows = [
            TaskOfStep(
                rank,
                task.action.stage,
                task.action.kind.value,
                task.action.microbatch,
                found.seconds[task.action],
                found.host_seconds[task.action],
                task.start,
                task.end,
            )
            for rank, tasks in enumerate(self.timeline.tasks)
            for task in tasks
        ]
        columns = [
            Column("rank", "rank", number=True),
            Column("", lambda row: f"{row.stage}{row.kind}{row.microbatch}"),
            Column("start", "start", units.seconds, number=True),
            Column("end", "end", units.seconds, number=True),
            Column("device", "seconds", units.seconds, number=True),
            Column("Python", "host_seconds", units.seconds, number=True),
        ]
        return Table(self._title(), sorted(rows, key=lambda row: (row.start, row.rank)), columns, most=40)

    # -- shown ----------------------------------------------------------------------------------------

    def text(self, width: int | None = None) -> str:
        """The simulated step as lines of text, one for each rank. width: characters that a line may have; default: those of the terminal."""
        return timeline_text.text(self.timeline, width)

    def picture(self, path: str | os.PathLike[str] | None = None, until: float | None = None, count: bool = False) -> Figure:
        """The simulated step as a `matplotlib.figure.Figure`, with the bytes of activations that ranks keep.

        path: a file to write it to as well (.png, .svg, .pdf). until: seconds at which time ends, so that several pictures have one scale. count: the lower
        part counts micro-batches instead of bytes.
        """
        from nxd_jax.inspect.pictures.schedule import Measure, drawn

        ranks = range(self.measured.schedule.ranks)
        measure = (
            Measure([self.memory.live(rank) for rank in ranks])
            if count
            else Measure([self.memory.activations(rank) for rank in ranks], "memory of activations kept", units.size)
        )
        scale, unit = next(((1 / size, unit) for size, unit in ((1.0, "s"), (1e-3, "ms")) if self.seconds >= 2 * size), (1e6, "us"))
        plan = self.measured.schedule
        title = (
            f"{plan.name}: {plan.stages} stages on {plan.ranks} ranks, {plan.microbatches} micro-batches, {units.seconds(self.seconds)}, "
            f"{self.idle_share:.1%} idle ({self.plan.idle_share:.1%} with equal stages)"
        )
        return drawn(self.timeline, measure, title, f"time in {unit}, simulated from measured computations", scale, path, until)

    def data(self) -> dict[str, object]:
        """Numbers and tables as JSON knows them."""
        return {
            "schedule": self.measured.schedule.name,
            "seconds": self.seconds,
            "idle_share": self.idle_share,
            "planned_idle_share": self.plan.idle_share,
            "ranks": self.ranks.data(),
            "stages": self.stages.data(),
            "tasks": self.tasks.data(),
        }

    def __str__(self) -> str:
        return f"{self.ranks}\n\n{self.text()}" if self.done else "no step of a pipeline has been measured yet"

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return self.ranks.html() + self.stages.html() if self.done else f"<div>{self}</div>"
