"""DualPipeV: two chunks in a V, forward passes of one micro-batch beside backward passes of another."""

from __future__ import annotations

from collections import deque

from nxd_jax.pipeline.schedules.actions import Action, backward, forward, input_backward, weight_backward
from nxd_jax.pipeline.schedules.schedule import ScheduleError


def dualpipev(ranks: int, chunks: int, microbatches: int) -> list[list[Action]]:
    """Rank r has stages r and 2P-1-r. Peak 2P+1. Raises ScheduleError for fewer than 2P micro-batches."""
    if microbatches < 2 * ranks:
        raise ScheduleError(
            f"the pipeline schedule dualpipev needs at least {2 * ranks} micro-batches for {ranks} ranks, got {microbatches}: raise num_microbatches, or "
            "choose the schedule zbv"
        )
    return [_Rank(ranks, rank).order(microbatches) for rank in range(ranks)]


class _Rank:
    """The order of one rank, phase by phase. Chunk 0 leads to the bottom of the V, chunk 1 back up."""

    def __init__(self, ranks: int, rank: int):
        self.ranks, self.rank = ranks, rank
        self.stages = (rank, 2 * ranks - 1 - rank)
        self.actions: list[Action] = []
        self.forwards, self.backwards = [0, 0], [0, 0]
        self.weights: deque[Action] = deque()

    def order(self, microbatches: int) -> list[Action]:
        """All its actions."""
        below, here = self.ranks - self.rank - 1, self.rank + 1
        for _ in range(2 * below):
            self._forward(0)
        for _ in range(here):
            self._forward(0)
            self._forward(1)
        for _ in range(below):
            self._backward(1, split=True)
            self._weights()
            self._forward(1)
        for _ in range(microbatches - 2 * self.ranks + here):
            self._forward(0)
            self._backward(1)
            self._forward(1)
            self._backward(0)
        for _ in range(below):
            self._backward(1)
            self._forward(1)
            self._backward(0)
        for k in range(2 * here):
            self._backward(1 - k % 2, split=k >= here)
        for _ in range(below):
            self._weights()
            self._backward(0, split=True)
        while self.weights:
            self._weights()
        return self.actions

    def _forward(self, chunk: int) -> None:
        self.actions.append(forward(self.stages[chunk], self.forwards[chunk]))
        self.forwards[chunk] += 1

    def _backward(self, chunk: int, split: bool = False) -> None:
        stage, microbatch = self.stages[chunk], self.backwards[chunk]
        self.backwards[chunk] += 1
        self.actions.append(input_backward(stage, microbatch) if split else backward(stage, microbatch))
        if split:
            self.weights.append(weight_backward(stage, microbatch))

    def _weights(self) -> None:
        self.actions.append(self.weights.popleft())
