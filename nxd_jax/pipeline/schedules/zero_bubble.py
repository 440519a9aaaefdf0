"""Schedules that compute gradients of weights apart, when a rank would be idle otherwise: ZB-H1, interleaved zero bubble, ZBV.

The order is found by going through the step with equal times for all computations. P: ranks, v: chunks, M: micro-batches; f, i, w: times of one stage.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from nxd_jax.pipeline.schedules.actions import Action, Kind, input_backward, weight_backward
from nxd_jax.pipeline.schedules.one_backward import group_size, in_turn
from nxd_jax.pipeline.schedules.simulate import unmet


def zb_h1(ranks: int, chunks: int, microbatches: int) -> list[list[Action]]:
    """1F1B with the backward pass in two parts, and no more memory than it. Idle (P-1)(F+I-W), peak P on every rank."""
    return _walk([_Rank(plan, ranks) for plan in in_turn(ranks, chunks, microbatches, 1, input_backward)], ranks)


def interleaved_zero_bubble(ranks: int, chunks: int, microbatches: int) -> list[list[Action]]:
    """Interleaved 1F1B with the backward pass in two parts. Idle (P-1)(f+i-w), peak v*P on every rank."""
    most = chunks * max(ranks, group_size(ranks, microbatches))
    return _walk([_Rank(plan, most) for plan in in_turn(ranks, chunks, microbatches, 1, input_backward)], ranks * chunks)


def zbv(ranks: int, chunks: int, microbatches: int) -> list[list[Action]]:
    """Two chunks in a V: rank r has stages r and 2P-1-r. Idle 0 between a rank's first and last task if f = i = w; peak 2P."""
    return _walk([_Rank(_plan_v(ranks, rank, microbatches), 2 * ranks, at_once=True) for rank in range(ranks)], 2 * ranks)


def _plan_v(ranks: int, rank: int, microbatches: int) -> list[Action]:
    """Forward passes and inputs' gradients of a rank in ZBV: down the V until the first micro-batch is back up, then all four in turn."""
    stages = (rank, 2 * ranks - 1 - rank)
    left = {(kind, chunk): deque(range(microbatches)) for kind in (Kind.FORWARD, Kind.INPUT_BACKWARD) for chunk in (0, 1)}
    plan: list[Action] = []

    def take(kind: Kind, chunk: int) -> None:
        if left[kind, chunk]:
            plan.append(Action(stages[chunk], kind, left[kind, chunk].popleft()))

    for _ in range(2 * (ranks - rank) - 1):
        take(Kind.FORWARD, 0)
    for _ in range(rank):
        take(Kind.FORWARD, 1)
        take(Kind.FORWARD, 0)
    take(Kind.FORWARD, 1)
    for _ in range(ranks - rank - 1):
        take(Kind.INPUT_BACKWARD, 1)
        take(Kind.FORWARD, 1)
    take(Kind.INPUT_BACKWARD, 1)
    while any(left.values()):
        take(Kind.FORWARD, 0)
        take(Kind.INPUT_BACKWARD, 0)
        take(Kind.FORWARD, 1)
        take(Kind.INPUT_BACKWARD, 1)
    return plan


class _Rank:
    """A rank on its way through the step.

    plan: its forward passes and gradients of inputs, in order. most: how many activations it may keep; more only if it could not go on otherwise. at_once:
    gradients of weights follow those of inputs at once as long as forward passes are to come; else they wait until the rank would be idle, or has no room.
    """

    def __init__(self, plan: list[Action], most: int, at_once: bool = False):
        self.plan, self.most, self.at_once = deque(plan), most, at_once
        self.forwards = sum(action.kind is Kind.FORWARD for action in plan)
        self.order: list[Action] = []
        self.held = 0
        self.weights: deque[Action] = deque()

    @property
    def done(self) -> bool:
        """Whether it has nothing left to do."""
        return not self.plan and not self.weights

    def step(self, ready: Callable[[Action], bool]) -> list[Action]:
        """Do what is next at this time, if anything is."""
        if self.weights and (self._weights_first() or not self.plan or not ready(self.plan[0])):
            action = self.weights.popleft()
            self.held -= 1
        elif self.plan and ready(self.plan[0]):
            action = self.plan.popleft()
            if action.kind is Kind.FORWARD:
                self.held += 1
                self.forwards -= 1
            else:
                self.weights.append(weight_backward(action.stage, action.microbatch))
        else:
            return []
        self.order.append(action)
        return [action]

    def _weights_first(self) -> bool:
        full = bool(self.plan) and self.plan[0].kind is Kind.FORWARD and self.held >= self.most
        return full or (self.at_once and self.forwards > 0)


def _walk(ranks: list[_Rank], stages: int) -> list[list[Action]]:
    """The orders of all ranks, from going through the step one computation at a time."""
    ended: set[Action] = set()

    def ready(action: Action) -> bool:
        return unmet(action, stages, ended) is None

    while not all(rank.done for rank in ranks):
        now = [action for rank in ranks for action in rank.step(ready)]
        assert now, "no rank can go on"
        ended.update(now)
    return [rank.order for rank in ranks]
