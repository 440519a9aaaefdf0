"""Options of optimizers and schedules as dataclasses, under NeMo's names: users' code derives its own from them, for `register_optimizer` and
`register_scheduler`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from omegaconf import MISSING

__all__ = ["AdamWParams", "OptimizerParams", "SchedulerParams"]


@dataclass
class OptimizerParams:
    """`nemo.core.config.optimizers.OptimizerParams`. lr must be given."""

    lr: float | None = MISSING


@dataclass
class AdamWParams(OptimizerParams):
    """`nemo.core.config.optimizers.AdamWParams`."""

    betas: Any = (0.9, 0.999)
    eps: float = 1e-08
    weight_decay: float = 0
    amsgrad: bool = False


@dataclass
class SchedulerParams:
    """`nemo.core.config.schedulers.SchedulerParams`."""

    last_epoch: int = -1
