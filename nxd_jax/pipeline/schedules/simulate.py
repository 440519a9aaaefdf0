"""When each action of a schedule runs, if every computation takes a given time: idle time and live activations of each rank, without any model."""

from __future__ import annotations

import functools
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from nxd_jax.pipeline.schedules.actions import Action, Kind
from nxd_jax.pipeline.schedules.schedule import Schedule


@dataclass(frozen=True)
class Times:
    """What one stage takes for one micro-batch, in any unit. transfer: from the end of a computation until another rank has its result."""

    forward: float = 1.0
    input_backward: float = 1.0
    weight_backward: float = 1.0
    transfer: float = 0.0

    def of(self, kind: Kind) -> float:
        """Of a kind of computation; a whole backward pass takes as long as its two parts."""
        if kind is Kind.BACKWARD:
            return self.input_backward + self.weight_backward
        return {Kind.FORWARD: self.forward, Kind.INPUT_BACKWARD: self.input_backward, Kind.WEIGHT_BACKWARD: self.weight_backward}[kind]


EQUAL = Times()
"""Every computation takes 1, a whole backward pass 2."""


class Task(NamedTuple):
    """An action with its time."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """By rank, when each action runs."""

    schedule: Schedule
    tasks: tuple[tuple[Task, ...], ...]

    @functools.cached_property
    def end(self) -> float:
        """When the last task ends; the first starts at 0."""
        return max((task.end for tasks in self.tasks for task in tasks), default=0.0)

    def idle(self, rank: int) -> float:
        """How long a rank does nothing within the whole step."""
        return self.end - sum(task.end - task.start for task in self.tasks[rank])

    def waiting(self, rank: int) -> float:
        """How long a rank does nothing between its own first and last task."""
        tasks = self.tasks[rank]
        return tasks[-1].end - tasks[0].start - sum(task.end - task.start for task in tasks) if tasks else 0.0

    @property
    def idle_share(self) -> float:
        """The share of all ranks' time in which they do nothing: the pipeline's bubble."""
        return sum(map(self.idle, range(len(self.tasks)))) / (self.end * len(self.tasks)) if self.end else 0.0

    def live(self, rank: int) -> list[tuple[float, int]]:
        """(time, how many micro-batches' activations the rank keeps from then on), a micro-batch counted for each stage that keeps it.

        They are kept from the start of the forward pass until the gradients of the weights are there.
        """
        changes = sorted(
            (task.end, -1) if task.action.kind in _FREES else (task.start, 1)
            for task in self.tasks[rank]
            if task.action.kind is not Kind.INPUT_BACKWARD
        )
        found: dict[float, int] = {}
        held = 0
        for time, change in changes:
            held += change
            found[time] = held
        return list(found.items())

    def peak(self, rank: int) -> int:
        """The most activations that the rank keeps at a time, counted as in `live`."""
        return max((held for _, held in self.live(rank)), default=0)


_FREES = {Kind.BACKWARD, Kind.WEIGHT_BACKWARD}


def needs(action: Action, stages: int) -> tuple[tuple[Action, ...], ...]:
    """What has to be done before an action: of each tuple one action."""
    stage, kind, microbatch = action
    if kind is Kind.FORWARD:
        return ((Action(stage - 1, kind, microbatch),),) if stage else ()
    if kind is Kind.WEIGHT_BACKWARD:
        return ((Action(stage, Kind.INPUT_BACKWARD, microbatch),),)
    own = (Action(stage, Kind.FORWARD, microbatch),)
    after = (Action(stage + 1, Kind.BACKWARD, microbatch), Action(stage + 1, Kind.INPUT_BACKWARD, microbatch))
    return (own, after) if stage + 1 < stages else (own,)


def unmet(action: Action, stages: int, done: Container[Action]) -> Action | None:
    """What an action still waits for; None: it can be done."""
    return next((choices[0] for choices in needs(action, stages) if not any(choice in done for choice in choices)), None)


@dataclass(frozen=True)
class Stuck:
    """Where a schedule cannot go on: by rank, how many actions it did; and for each rank that has more, what its next one waits for."""

    done: tuple[int, ...]
    waits: dict[int, tuple[Action, Action]]


def run(schedule: Schedule, times: Times | Sequence[Times] = EQUAL, durations: Mapping[Action, float] | None = None) -> Timeline | Stuck:
    """Let every rank do its actions in order, each as soon as what it needs is there.

    times: of all stages, or of each. durations: what single actions take, where it is known; `times` says the rest.
    """
    measured = durations or {}
    stages, placement = schedule.stages, schedule.placement
    of_stage = list(times) if isinstance(times, Sequence) else [times] * stages
    ended: dict[Action, float] = {}
    tasks: list[list[Task]] = [[] for _ in schedule.orders]
    clock = [0.0] * schedule.ranks
    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(schedule.orders):
            for action in order[len(tasks[rank]) :]:
                if unmet(action, stages, ended) is not None:
                    break
                own = of_stage[action.stage]
                start = clock[rank]
                for choices in needs(action, stages):
                    found = next(choice for choice in choices if choice in ended)
                    start = max(start, ended[found] + (own.transfer if placement[found.stage] != rank else 0.0))
                clock[rank] = ended[action] = start + measured.get(action, own.of(action.kind))
                tasks[rank].append(Task(action, start, clock[rank]))
                moved = True
    waits: dict[int, tuple[Action, Action]] = {}
    for rank, order in enumerate(schedule.orders):
        for action in order[len(tasks[rank]) :][:1]:
            missing = unmet(action, stages, ended)
            assert missing is not None, f"{action} could be done"
            waits[rank] = action, missing
    return Stuck(tuple(map(len, tasks)), waits) if waits else Timeline(schedule, tuple(map(tuple, tasks)))
