"""What ranks keep over the time of a measured step: arrays, each from the end of the computation that made it to the end of the one that let go of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from nxd_jax.inspect.timeline_measured import Measured
from nxd_jax.pipeline.schedules import Action, Kind, Timeline

Levels = list[tuple[float, int]]
"""(time, how much there is from then on)."""


class Memory:
    """The arrays of a step in a timeline of it."""

    def __init__(self, found: Measured, timeline: Timeline):
        self.found = found
        self.ends = {task.action: task.end for tasks in timeline.tasks for task in tasks}

    def live(self, rank: int) -> Levels:
        """How many micro-batches' activations a rank keeps: from the end of a forward pass until the last array that it left on the rank is gone."""
        last: dict[Action, int] = {}
        for action, died, _ in self._activations(rank):
            if action.kind is Kind.FORWARD:
                last[action] = max(last.get(action, 0), died)
        return _levels([*((self.ends[action], 1) for action in last), *((self._end(died), -1) for died in last.values())])

    def activations(self, rank: int) -> Levels:
        """Bytes of activations on a rank's first core."""
        found = [(action, died, size) for action, died, size in self._activations(rank)]
        return _levels([*((self.ends[action], size) for action, _, size in found), *((self._end(died), -size) for _, died, size in found)])

    def all(self, rank: int) -> Levels:
        """Bytes of everything on a rank's first core."""
        changes: Levels = []
        for kept in self.found.arrays:
            size = sum(size for at, size in kept.sizes if at == rank)
            changes.append((self._end(kept.born), size))
            if kept.died is not None:
                changes.append((self._end(kept.died), -size))
        return _levels(changes)

    def held(self, rank: int) -> int:
        """Bytes on a rank's first core before the step."""
        return sum(size for kept in self.found.arrays if kept.born < 0 for at, size in kept.sizes if at == rank)

    def of_micro_batch(self, stage: int) -> int:
        """Bytes that a stage keeps of a micro-batch between forward and backward: the most of all micro-batches."""
        order, sums = self.found.order, dict.fromkeys(range(self.found.schedule.microbatches), 0)
        at = {action: number for number, action in enumerate(order)}
        for action, died, size in self._activations(self.found.schedule.placement[stage]):
            back = (Action(action.stage, kind, action.microbatch) for kind in (Kind.BACKWARD, Kind.INPUT_BACKWARD))
            if action.stage == stage and action.kind is Kind.FORWARD and died >= min(at[one] for one in back if one in at):
                sums[action.microbatch] += size
        return max(sums.values())

    def _activations(self, rank: int) -> Iterator[tuple[Action, int, int]]:
        """Of arrays that a rank's own forward passes, and backward passes for inputs, left on it for later ones: by what, until which action, bytes.

        Single numbers that are still there after the step are losses; anything else that is, the rank never let go of.
        """
        placement = self.found.schedule.placement
        for kept in self.found.arrays:
            if kept.born < 0 or (kept.died is None and kept.scalar):
                continue
            died = len(self.found.order) if kept.died is None else kept.died
            action = self.found.order[kept.born]
            if placement[action.stage] == rank and action.kind in (Kind.FORWARD, Kind.INPUT_BACKWARD):
                yield from ((action, died, size) for at, size in kept.sizes if at == rank)

    def _end(self, number: int) -> float:
        """When an action ends, by its number; before the first it is 0, after the last the end of the step."""
        order = self.found.order
        return 0.0 if number < 0 else self.ends[order[number]] if number < len(order) else max(self.ends.values())


def peak(levels: Levels) -> int:
    """The most."""
    return max((level for _, level in levels), default=0)


def _levels(changes: Iterable[tuple[float, int]]) -> Levels:
    """Sums of changes; those of one time count together."""
    found: dict[float, int] = {}
    for time, change in changes:
        found[time] = found.get(time, 0) + change
    level, levels = 0, []
    for time in sorted(found):
        level += found[time]
        levels.append((time, level))
    return levels
