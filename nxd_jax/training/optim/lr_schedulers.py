"""`neuronx_distributed_training.optim.lr_schedulers`: schedules of learning rates, under NeMo's names.

Each is a class with `rate(step, base)`, the learning rate of the step with that number (from 0) where an optimizer was given `base`. Legend: w warmup_steps,
c constant_steps, m max_steps, lowest min_lr.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from nxd_jax.training.optim.params import SchedulerParams

logger = logging.getLogger("nxd_jax")

_OPTIONS = ("warmup_steps", "constant_steps", "hold_steps", "max_steps", "min_lr", "power", "cycle", "decay_rate", "_normalize")
"""Attributes of schedules that a configuration says."""


@dataclass
class LinearAnnealingWithWarmupParams(SchedulerParams):
    """Options of `LinearAnnealingWithWarmUp`."""

    warmup_steps: int = 0
    max_steps: int = 0


class Curve(LRScheduler):
    """Learning rates as a function of the step. A training that goes on takes the step and the base rates from its checkpoint, and all else from its
    configuration.

    Subclasses write `rate(step, base)`.
    """

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on behind the step of a checkpoint. Where the curve was another one there, the optimizer gets this one's rates, and a line says so."""
        own = {name: value for name, value in vars(self).items() if name in _OPTIONS}
        super().load_state_dict(state_dict)
        others = {name: state_dict[name] for name in own if state_dict.get(name, own[name]) != own[name]}
        vars(self).update(own)
        if not others:
            return
        changes = ", ".join(f"{name}={own[name]} in place of {value}" for name, value in others.items())
        logger.warning("learning rates go on from step %d with %s, which the checkpoint had", self.last_epoch, changes)
        self._last_lr = self.get_lr()
        for group, rate in zip(self.optimizer.param_groups, self._last_lr, strict=True):
            group["lr"] = rate

    def get_lr(self) -> list[Any]:
        """The learning rates of the coming step."""
        return [self.rate(self.last_epoch, float(base)) for base in self.base_lrs]

    def rate(self, step: int, base: float) -> float:
        """The learning rate of a step."""
        raise NotImplementedError(f"{type(self).__name__} must override rate(step, base)")


class Schedule(Curve):
    """What all have in common: a warm-up, what a subclass says (`after`), and `min_lr` behind `max_steps`.

    warmup_steps, or warmup_ratio of max_steps. During the warm-up the rate is base * (step + 1) / (w + 1).

    Raises ValueError for both kinds of warm-up, a ratio without max_steps, or numbers out of range.
    """

    takes_constant_steps = False
    takes_hold_steps = False

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        warmup_steps: int | None = None,
        warmup_ratio: float | None = None,
        max_steps: int | None = None,
        min_lr: float = 0.0,
        last_epoch: int = -1,
    ):
        self.max_steps = max_steps
        self.warmup_steps = _share("warmup", warmup_steps, warmup_ratio, max_steps)
        self.min_lr = float(min_lr)
        super().__init__(optimizer, last_epoch)

    def rate(self, step: int, base: float) -> float:
        """The learning rate of a step."""
        if self.warmup_steps > 0 and step <= self.warmup_steps:
            return self.warming(step, base)
        if self.max_steps is not None and step > self.max_steps:
            return self.min_lr
        return self.after(step, base)

    def warming(self, step: int, base: float) -> float:
        """The rate while step <= w."""
        return base * (step + 1) / (self.warmup_steps + 1)

    def after(self, step: int, base: float) -> float:
        """The rate when the warm-up is over."""
        return base

    @property
    def _rest(self) -> int:
        """m - w, for schedules that need max_steps."""
        if self.max_steps is None:
            raise ValueError(f"{type(self).__name__} needs max_steps (which is trainer.max_steps)")
        return max(self.max_steps - self.warmup_steps, 1)


class WarmupPolicy(Schedule):
    """A warm-up, then the base rate."""


class WarmupHoldPolicy(Schedule):
    """A warm-up, then the base rate; hold_steps or hold_ratio, for which subclasses keep it before they lower it."""

    takes_hold_steps = True

    def __init__(self, optimizer: Optimizer, *, hold_steps: int | None = None, hold_ratio: float | None = None, **options: Any):
        self.hold_steps = _share("hold", hold_steps, hold_ratio, options.get("max_steps"))
        super().__init__(optimizer, **options)

    def rate(self, step: int, base: float) -> float:
        """The learning rate of a step."""
        return base if self.warmup_steps < step < self.warmup_steps + self.hold_steps else super().rate(step, base)

    @property
    def _falling(self) -> int:
        """m - w - hold_steps."""
        return max(self._rest - self.hold_steps, 1)


class CosineAnnealing(Schedule):
    """Half a cosine from the base rate to min_lr.

    With constant_steps > 0 Megatron's form: base * step / w, half a cosine over m - c - w steps, then min_lr. (Where c + w exceeds m, the rate is min_lr from
    the end of the warm-up on, as in the original.)

    Raises ValueError for a base rate below min_lr.
    """

    takes_constant_steps = True

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        constant_steps: int | None = None,
        constant_ratio: float | None = None,
        min_lr: float = 0.0,
        **options: Any,
    ):
        self.constant_steps = _share("constant", constant_steps, constant_ratio, options.get("max_steps"))
        for group in optimizer.param_groups:
            base = float(group.get("initial_lr", group["lr"]))
            if base < min_lr:
                raise ValueError(f"CosineAnnealing: min_lr={min_lr} must not be above the learning rate, which is {base}")
        super().__init__(optimizer, min_lr=min_lr, **options)

    def warming(self, step: int, base: float) -> float:
        return base * step / self.warmup_steps if self.constant_steps else super().warming(step, base)

    def after(self, step: int, base: float) -> float:
        decay = self._rest if not self.constant_steps else (self.max_steps or 0) - self.constant_steps - self.warmup_steps
        gone = step - self.warmup_steps
        if self.constant_steps and gone > decay:
            return self.min_lr
        return self.min_lr + (base - self.min_lr) * 0.5 * (1 + math.cos(math.pi * gone / decay))


class SquareAnnealing(Schedule):
    """The square of what is left of the steps, at least min_lr, which is 1e-5 unless it is said."""

    def __init__(self, optimizer: Optimizer, *, min_lr: float = 1e-5, **options: Any):
        super().__init__(optimizer, min_lr=min_lr, **options)

    def after(self, step: int, base: float) -> float:
        left = max(self._rest - (step - self.warmup_steps), 0) / self._rest
        return max(base * left**2, self.min_lr)


class SquareRootAnnealing(Schedule):
    """The root of what is left of the steps, at least min_lr. Steps of the warm-up count: behind it the rate is sqrt((m - step) / m) of the base."""

    def after(self, step: int, base: float) -> float:
        steps = self._rest + self.warmup_steps
        return max(base * (max(steps - step, 0) / steps) ** 0.5, self.min_lr)


class InverseSquareRootAnnealing(Schedule):
    """base * sqrt((w + 1) / (step + 1))."""

    def after(self, step: int, base: float) -> float:
        return base * ((self.warmup_steps + 1) / (step + 1)) ** 0.5


class WarmupAnnealing(Schedule):
    """A straight line from the base rate, at the end of the warm-up, to min_lr at max_steps."""

    def after(self, step: int, base: float) -> float:
        return base + (self.min_lr - base) * min((step - self.warmup_steps) / self._rest, 1.0)


class PolynomialDecayAnnealing(Schedule):
    """min_lr + (base - min_lr) * (what is left of the steps) ** power. cycle: past max_steps begin again (which a training does not reach)."""

    def __init__(self, optimizer: Optimizer, *, power: float = 1.0, cycle: bool = False, **options: Any):
        self.power = float(power)
        self.cycle = bool(cycle)
        super().__init__(optimizer, **options)

    def after(self, step: int, base: float) -> float:
        return self._polynomial(step - self.warmup_steps, self._rest, base)

    def _polynomial(self, gone: int, steps: int, base: float) -> float:
        """The rate when `gone` of `steps` steps are over."""
        if self.cycle and gone > 0:
            steps *= math.ceil(gone / steps)
        left = 1.0 - min(gone / steps, 1.0)
        return float(self.min_lr + (base - self.min_lr) * left**self.power)


class PolynomialHoldDecayAnnealing(PolynomialDecayAnnealing, WarmupHoldPolicy):
    """As `PolynomialDecayAnnealing`, behind the steps that the rate is held."""

    def after(self, step: int, base: float) -> float:
        return self._polynomial(step - self.warmup_steps - self.hold_steps, self._falling, base)


class NoamHoldAnnealing(WarmupHoldPolicy):
    """Behind the warm-up and the steps that the rate is held: base * (w / (step - hold_steps)) ** decay_rate, at least min_lr.

    Raises ValueError without a warm-up.
    """

    def __init__(self, optimizer: Optimizer, *, decay_rate: float = 0.5, **options: Any):
        self.decay_rate = float(decay_rate)
        if not options.get("warmup_steps") and not options.get("warmup_ratio"):
            raise ValueError("NoamHoldAnnealing needs warmup_steps or warmup_ratio: the rate falls from their number on")
        super().__init__(optimizer, **options)

    def after(self, step: int, base: float) -> float:
        raised = max(1.0, self.warmup_steps**self.decay_rate)
        return max(base * raised / max(1.0, (step - self.hold_steps) ** self.decay_rate), self.min_lr)


class NoamAnnealing(Schedule):
    """base / sqrt(d_model) times the lesser of step**-0.5 and step * w**-1.5; at least min_lr when the warm-up is over."""

    def __init__(self, optimizer: Optimizer, *, d_model: int, **options: Any):
        self._normalize = d_model**-0.5
        super().__init__(optimizer, **options)

    def rate(self, step: int, base: float) -> float:
        step = max(step, 1)
        w = self.warmup_steps
        found = base * self._normalize * (min(step**-0.5, step * w**-1.5) if w > 0 else step**-0.5)
        return max(found, self.min_lr) if step > w else found


class LinearAnnealingWithWarmUp(Curve):
    """A straight line from 0 to the base rate over warmup_steps, then one to 0 at max_steps; the first step's rate is 0 (as transformers')."""

    def __init__(self, optimizer: Optimizer, warmup_steps: int = 0, max_steps: int = 0, last_epoch: int = -1):
        self.warmup_steps = _share("warmup", warmup_steps, None, max_steps)
        self.max_steps = int(max_steps)
        super().__init__(optimizer, last_epoch)

    def rate(self, step: int, base: float) -> float:
        """The learning rate of a step."""
        if step < self.warmup_steps:
            return base * step / max(1, self.warmup_steps)
        return base * max(0.0, (self.max_steps - step) / max(1, self.max_steps - self.warmup_steps))


def _share(name: str, steps: int | None, ratio: float | None, max_steps: int | None) -> int:
    """A number of steps, said as such or as a share of max_steps. Raises ValueError for both, a part of a step, or a share of nothing."""
    if steps is not None and ratio is not None:
        raise ValueError(f"give {name}_steps or {name}_ratio, not both: {steps}, {ratio}")
    if ratio is not None:
        if not 0 <= ratio <= 1:
            raise ValueError(f"{name}_ratio={ratio} must be between 0 and 1")
        if max_steps is None:
            raise ValueError(f"{name}_ratio={ratio} needs max_steps (which is trainer.max_steps)")
        return int(ratio * max_steps)
    if steps is not None and (steps < 0 or steps != int(steps)):
        raise ValueError(f"{name}_steps={steps} must be a whole number of steps, and not negative")
    return int(steps or 0)
