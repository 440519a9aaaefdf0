"""A step of a pipeline as it was measured, and the rows of its tables."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from nxd_jax.inspect.timeline_arrays import Kept
from nxd_jax.pipeline.schedules import Action, Kind, Schedule


@dataclass
class Measured:
    """A step as it ran.

    Attributes:
        schedule: of the model.
        order: the actions in the order in which they ran.
        seconds: of each on the devices.
        host_seconds: of each in Python.
        arrays: what there was before the step and what it made.
        compiled: how many programs were compiled in it.
        steps: how many steps it is of: seconds are the least of them.
    """

    schedule: Schedule
    order: list[Action] = field(default_factory=list)
    seconds: dict[Action, float] = field(default_factory=dict)
    host_seconds: dict[Action, float] = field(default_factory=dict)
    arrays: list[Kept] = field(default_factory=list)
    compiled: int = 0
    steps: int = 1

    def also(self, later: Measured) -> Measured:
        """This step and a later one as one: what each computation took at least. The later one alone if they are not alike, or if this one compiled."""
        if self.compiled or self.schedule is not later.schedule or self._forward() != later._forward():
            return later
        seconds = {action: min(self.seconds[action], taken) for action, taken in later.seconds.items()}
        host = {action: min(self.host_seconds[action], taken) for action, taken in later.host_seconds.items()}
        return replace(later, seconds=seconds, host_seconds=host, steps=self.steps + 1)

    def _forward(self) -> list[tuple[int, tuple[tuple[int, int], ...]]]:
        """What forward passes made: batches of other shapes make other arrays."""
        return sorted((kept.born, kept.sizes) for kept in self.arrays if kept.born >= 0 and self.order[kept.born].kind is Kind.FORWARD)


@dataclass(frozen=True)
class RankOfStep:
    """What a pipeline rank does in a step. Times in seconds, of the simulated timeline; bytes on its first core.

    Attributes:
        rank: the pipeline rank.
        stages: the stages that it holds.
        busy: how long it computes.
        idle: how long it does nothing within the whole step.
        waiting: how long of that it waits between its own first and last computation.
        peak: most micro-batches whose activations it keeps at a time, counted in the arrays, once for each stage that keeps them.
        planned_peak: the same of the schedule.
        activation_bytes: the most that its activations take.
        held_bytes: what it held before the step: weights, optimizer state, gradients.
        peak_bytes: the most that it holds between two computations.
    """

    rank: int
    stages: tuple[int, ...]
    busy: float
    idle: float
    waiting: float
    peak: int
    planned_peak: int
    activation_bytes: int
    held_bytes: int
    peak_bytes: int


@dataclass(frozen=True)
class StageOfStep:
    """What a stage takes for a micro-batch: medians over micro-batches, in seconds; None: the schedule has no such computation.

    Attributes:
        stage: its number.
        rank: the pipeline rank that holds it.
        forward, backward, input_backward, weight_backward: of its computations.
        activation_bytes: what it keeps of a micro-batch until the backward pass, on the first core of its rank.
    """

    stage: int
    rank: int
    forward: float | None
    backward: float | None
    input_backward: float | None
    weight_backward: float | None
    activation_bytes: int


@dataclass(frozen=True)
class TaskOfStep:
    """A computation. seconds: measured on the devices; host_seconds: measured in Python (recording, dispatching); start, end: in the simulated timeline."""

    rank: int
    stage: int
    kind: str
    microbatch: int
    seconds: float
    host_seconds: float
    start: float
    end: float
