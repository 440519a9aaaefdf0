"""torch's learning rate schedulers as functions of the step, for use inside `jax.jit`.

A scheduler is a Python program that changes its optimizer's numbers. A copy of it runs on the host, once, and what it sets is kept in tables. Where a
scheduler comes to rest or repeats itself, a table goes on for ever; elsewhere it has as many steps as the caller asks for.
"""

from __future__ import annotations

import copy
import math
import warnings
from array import array
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import optim
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

Groups = list[dict[str, Any]]
Read = Callable[[Groups], dict[Any, float]]
"""What is to be tabulated, of `param_groups`."""

LR = "lr"
"""The number that a geometric tail scales. The last part of a key, where keys are tuples."""


class Tail(NamedTuple):
    """How a scheduler goes on: from epoch `start` on, what lies `period` epochs later is the same, learning rates times `ratio`."""

    start: int
    period: int
    ratio: float = 1.0


class Table(NamedTuple):
    """A number, epoch by epoch: `table(k)` for a Python int or a traced integer.

    first: the epoch of values[0]. tail: None if the table ends; a learning rate beyond it is NaN, and an error where the epoch is no tracer.
    """

    values: np.ndarray
    first: int
    tail: Tail | None

    def __call__(self, epoch: Any) -> Any:
        k = epoch - self.first
        n = len(self.values)
        table = jnp.asarray(self.values, float)
        if self.tail is None:
            if not isinstance(k, jax.core.Tracer):
                self._check(int(epoch))
            return jnp.where((k >= 0) & (k < n), table[jnp.clip(k, 0, n - 1)], jnp.nan)
        again = n - self.tail.period
        over = jnp.maximum(k - again, 0)
        value = table[jnp.where(k < again, jnp.maximum(k, 0), again + over % self.tail.period)]
        return value if self.tail.ratio == 1 else value * jnp.exp(math.log(self.tail.ratio) * (over // self.tail.period))

    def _check(self, epoch: int) -> None:
        if not 0 <= epoch - self.first < len(self.values):
            raise ValueError(
                f"the scheduler was tabulated from its step {self.first} to {self.first + len(self.values) - 1}, and this is step {epoch}: pass a larger "
                "`steps` to to_optax, if the scheduler has that many"
            )


class Clock:
    """A copy of a scheduler with the numbers of its optimizer, and no tensors; `steps(n)` moves it on."""

    def __init__(self, scheduler: lr_scheduler.LRScheduler):
        self.groups = _StandIn(scheduler.optimizer)
        self.scheduler = copy.deepcopy(scheduler, {id(scheduler.optimizer): self.groups})

    @property
    def epoch(self) -> int:
        return epoch_of(self.scheduler)

    @property
    def param_groups(self) -> Groups:
        return self.groups.param_groups

    def copy(self) -> Clock:
        return copy.deepcopy(self)

    def step(self) -> bool:
        """One step; False if the scheduler has no more."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # older torch deprecates what its own SequentialLR calls
                self.scheduler.step()
        except ValueError as error:
            if "number of total steps" in str(error):  # OneCycleLR's
                return False
            raise
        return True


class _StandIn:
    """What a scheduler sees of its optimizer."""

    def __init__(self, optimizer: optim.Optimizer):
        self.defaults = dict(optimizer.defaults)
        self.param_groups = [{key: _own(value) for key, value in g.items() if key != "params"} for g in optimizer.param_groups]
        self._opt_called = True

    def step(self) -> None:
        """Schedulers look whether it is wrapped."""

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]


def _own(value: object) -> Any:
    return value.detach().cpu().clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)


def epoch_of(scheduler: Any) -> int:
    """How often it was stepped."""
    while not hasattr(scheduler, "last_epoch"):  # ChainedScheduler has none
        scheduler = scheduler._schedulers[0]
    return int(scheduler.last_epoch)


def check(scheduler: LRScheduler, optimizer: optim.Optimizer) -> None:
    """TypeError for schedulers that cannot be tabulated, ValueError for one of another optimizer."""
    if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
        raise TypeError(
            "ReduceLROnPlateau depends on the loss, not on the step: leave it out of to_optax, and chain what it gives with "
            "optax.contrib.reduce_on_plateau(...), to whose update the loss is passed as value="
        )
    if not isinstance(scheduler, lr_scheduler.LRScheduler):
        raise TypeError(
            f"scheduler must be a torch.optim.lr_scheduler.LRScheduler, got {type(scheduler).__name__}: for another one, leave it out and chain what "
            "to_optax gives with optax.scale_by_schedule(lambda step: factor)"
        )
    if scheduler.optimizer is not optimizer:
        raise ValueError(
            f"the {type(scheduler).__name__} schedules another optimizer than the {type(optimizer).__name__} that to_optax was given"
        )


def tabulate(clock: Clock, read: Read, steps: int | None) -> dict[Any, float | Table]:
    """What `read` gives in this and the following epochs: floats where that never changes, else tables.

    steps: how many more steps there are to be; None: as long as the scheduler may go on, ValueError where that has no end.
    """
    if steps is not None or isinstance(clock.scheduler, lr_scheduler.OneCycleLR):
        return _columns(_run(clock, read, None if steps is None else steps + 1), clock.epoch, None)
    tail = tail_of(clock.scheduler)
    if tail is None or tail.start + 2 * tail.period - clock.epoch > _LONGEST:
        raise _without_end(clock.scheduler)
    length = max(tail.start - clock.epoch, 0) + tail.period
    columns = _run(clock, read, length + tail.period)
    if not all(_goes_on(values[-2 * tail.period :], tail, key) for key, values in columns.items()):
        raise _without_end(clock.scheduler)
    return _columns({key: values[:length] for key, values in columns.items()}, clock.epoch, tail)


_LONGEST = 2_000_000


def _without_end(scheduler: LRScheduler) -> ValueError:
    kind = type(scheduler).__name__
    return ValueError(
        f"a {kind} may go on for ever without repeating itself: say how many optimizer steps are to come, to_optax(..., steps=10_000)"
    )


def _run(clock: Clock, read: Read, count: int | None) -> dict[Any, np.ndarray]:
    """`count` values of each number, or fewer where the scheduler ends."""
    clock = clock.copy()
    found = {key: array("d", [value]) for key, value in read(clock.param_groups).items()}
    done = 1
    while (count is None or done < count) and clock.step():
        done += 1
        for key, value in read(clock.param_groups).items():
            found[key].append(value)
    return {key: np.array(values) for key, values in found.items()}


def _columns(columns: dict[Any, np.ndarray], first: int, tail: Tail | None) -> dict[Any, float | Table]:
    found: dict[Any, float | Table] = {}
    for key, values in columns.items():
        own = None if tail is None else tail._replace(ratio=_ratio(key, tail))
        ends = own is None and _is_rate(key)
        constant = bool((values == values[0]).all()) and (own is None or own.ratio == 1)
        found[key] = float(values[0]) if constant and not ends else Table(values, first, own)
    return found


def _is_rate(key: object) -> bool:
    return (key[-1] if isinstance(key, tuple) else key) == LR


def _ratio(key: object, tail: Tail) -> float:
    return tail.ratio if _is_rate(key) else 1.0


def _goes_on(values: np.ndarray, tail: Tail, key: object) -> bool:
    """Whether the second half of two periods is what a tail says of the first."""
    before, after = np.split(values, 2)
    return bool(np.isclose(after, before * _ratio(key, tail), rtol=1e-6, atol=1e-12).all())


# -- schedulers that rest or repeat ------------------------------------------------------------------------


def tail_of(scheduler: LRScheduler) -> Tail | None:
    """How a scheduler goes on for ever, in its own epochs; None if it does not say."""
    find = _TAILS.get(type(scheduler))
    tail = None if find is None else find(scheduler)
    if tail is None or not (tail.ratio > 0 and tail.period > 0 and tail.period == int(tail.period)):
        return None
    return Tail(math.ceil(tail.start), int(tail.period), tail.ratio)


def _cyclic(s: Any) -> Tail | None:
    return Tail(0, s.total_size) if s._scale_fn_custom is None and s.mode == "triangular" else None


def _sequential(s: Any) -> Tail | None:
    last = tail_of(s._schedulers[-1])
    return None if last is None else last._replace(start=last.start + max(s._milestones, default=0))


def _chained(s: Any) -> Tail | None:
    """Epochs are those of the first scheduler; the others may be ahead or behind."""
    parts = [tail_of(part) for part in s._schedulers]
    found = [part for part in parts if part is not None]
    if len(found) < len(parts):
        return None
    ahead = [epoch_of(s) - epoch_of(part) for part in s._schedulers]
    period = math.lcm(*(part.period for part in found))
    ratio = math.prod(part.ratio ** (period // part.period) for part in found)
    return Tail(max(part.start + gap for part, gap in zip(found, ahead, strict=True)), period, ratio)


_TAILS: dict[type, Callable[[Any], Tail | None]] = {
    lr_scheduler.StepLR: lambda s: Tail(0, s.step_size, s.gamma),
    lr_scheduler.MultiStepLR: lambda s: Tail(max(s.milestones, default=0), 1),
    lr_scheduler.ConstantLR: lambda s: Tail(s.total_iters, 1),
    lr_scheduler.LinearLR: lambda s: Tail(s.total_iters, 1),
    lr_scheduler.ExponentialLR: lambda s: Tail(0, 1, s.gamma),
    lr_scheduler.PolynomialLR: lambda s: Tail(s.total_iters, 1),
    lr_scheduler.CosineAnnealingLR: lambda s: Tail(0, 2 * s.T_max),
    lr_scheduler.CosineAnnealingWarmRestarts: lambda s: Tail(0, s.T_0) if s.T_mult == 1 else None,
    lr_scheduler.CyclicLR: _cyclic,
    lr_scheduler.SequentialLR: _sequential,
    lr_scheduler.ChainedScheduler: _chained,
}
