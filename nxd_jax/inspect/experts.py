"""`inspect.experts`: how busy the experts of a model are, by layer and over the steps of training."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from nxd_jax.inspect import units
from nxd_jax.inspect.tables import Column, Table
from nxd_jax.modules.moe import load
from nxd_jax.modules.moe.load import LoadLog, LoadStatistics
from nxd_jax.modules.moe.load_log import LoadOfStep

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LEVELS = "·▁▂▃▄▅▆▇█"
"""Of an expert in text: nobody chose it; then eighths of twice the mean."""


@dataclass(frozen=True)
class LayerOfExperts:
    """A layer in the time that was looked at.

    Attributes:
        layer: its name.
        tokens: choices of each expert, over all data- and context-parallel ranks.
        imbalance: what the busiest expert has, over the mean; NaN if nothing was counted.
        dropped_share: of all choices, those that found their expert full; NaN if nothing was counted.
        busiest: the number of that expert.
        idle: experts that nobody chose.
    """

    layer: str
    tokens: tuple[int, ...]
    imbalance: float
    dropped_share: float
    busiest: int
    idle: int

    @property
    def relative(self) -> tuple[float, ...]:
        """Tokens of each expert over the mean; all 0 if nothing was counted."""
        mean = sum(self.tokens) / len(self.tokens)
        return tuple(n / mean if mean else 0.0 for n in self.tokens)


class ExpertTable(Table[LayerOfExperts]):
    """A row for each layer; `picture()` draws it, and `print` shows a bar for each expert below the table.

    steps: what a `LoadLog` noted, the oldest first; () for a model.
    """

    def __init__(self, found: Mapping[str, LoadStatistics], steps: Sequence[LoadOfStep] = ()):
        self.steps = tuple(steps)
        rows = [
            LayerOfExperts(name, s.tokens, s.imbalance, s.dropped_share, s.tokens.index(max(s.tokens)), s.idle_experts)
            for name, s in found.items()
        ]
        columns = [
            Column("layer", lambda row: row.layer or "the model"),
            Column("experts", lambda row: len(row.tokens), number=True),
            Column("choices", lambda row: sum(row.tokens), units.count, number=True),
            Column("busiest / mean", "imbalance", "{:.2f}".format, number=True),
            Column("busiest", "busiest", number=True),
            Column("idle", "idle", number=True),
            Column("dropped", "dropped_share", "{:.1%}".format, number=True),
        ]
        super().__init__("Experts", rows, columns, self._said(rows))

    def _said(self, rows: Sequence[LayerOfExperts]) -> str:
        counted = [row for row in rows if sum(row.tokens)]
        when = f"{units.many(len(self.steps), 'step')}: " if self.steps else ""
        if not counted:
            return f"{when}nothing was counted: it counts in training, after load.track(model)"
        worst = max(counted, key=lambda row: row.imbalance)
        if len(rows) == 1:
            return f"{when}expert {worst.busiest} gets {worst.imbalance:.2f} times the mean"
        return f"{when}busiest of all is expert {worst.busiest} of {worst.layer}, with {worst.imbalance:.2f} times the mean"

    def text(self) -> str:
        """A line of bars for each layer, one for each expert: as high as its tokens over the mean, the whole height being twice the mean or more."""
        names = [row.layer or "the model" for row in self.rows]
        width = max(map(len, names), default=0)
        lines = [f"{name.ljust(width)} {''.join(map(bar, row.relative))}" for name, row in zip(names, self.rows, strict=True)]
        return "\n".join([*lines, f"{LEVELS[4]} the mean, {LEVELS[-1]} twice the mean or more, {LEVELS[0]} nothing"])

    def __str__(self) -> str:
        return f"{super().__str__()}\n\n{self.text()}"

    def picture(self, path: str | os.PathLike[str] | None = None) -> Figure:
        """All this as a `matplotlib.figure.Figure` (`nxd_jax.inspect.experts_picture`)."""
        from nxd_jax.inspect.pictures.experts import experts_picture

        return experts_picture(self, path)


def bar(relative: float) -> str:
    """The character for tokens over the mean."""
    return LEVELS[min(max(1, math.ceil(4 * relative - 0.5)), 8)] if relative else LEVELS[0]


def experts(of: torch.nn.Module | LoadLog) -> ExpertTable:
    """How busy experts are: `print(inspect.experts(model))`, `inspect.experts(log).picture()`. Waits for the device.

    Args:
        of: a model whose MoE layers count (`nxd_jax.modules.moe.load.track`): all that was counted since the last reset. Or a `load.LoadLog`: the steps that it
            noted, with a run over them.

    Raises ValueError for a model without MoE layers, for layers that do not count, and for a log without a step; TypeError for anything else.
    """
    if isinstance(of, torch.nn.Module):
        return ExpertTable(load.measure(of))
    if not isinstance(of, LoadLog):
        raise TypeError(f"experts takes a model or a load.LoadLog, got {type(of).__name__}")
    steps = of.steps
    if not steps:
        raise ValueError("this log has noted no step yet: call log.step() after each optimizer step, then experts(log)")
    return ExpertTable(_together(steps), steps)


def _together(steps: Sequence[LoadOfStep]) -> dict[str, LoadStatistics]:
    """All steps as one."""
    found = {}
    for name in steps[-1].layers:
        each = [step.layers[name] for step in steps]
        tokens = tuple(map(sum, zip(*(s.tokens for s in each), strict=True)))
        found[name] = LoadStatistics(tokens, sum(s.dropped for s in each))
    return found
