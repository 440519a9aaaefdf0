"""The learning rates that a configuration leads to: a few rows, and a picture."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from nxd_jax.training.config.facts import Facts
from nxd_jax.training.optim import registry

POINTS = 400
"""Steps that a picture has, at most."""


class Rates:
    """`rates(step)`: the learning rate of a step, from 0. steps: how many there are. marks: steps at which something changes, with words."""

    def __init__(self, lr: float, sched: Mapping[str, Any] | None, steps: int):
        self.lr = lr
        self.steps = steps
        self.name = "constant" if sched is None else str(sched.get("name"))
        if self.name in registry.EACH_EPOCH:
            raise ValueError(f"{self.name} changes the rate with each epoch, and an epoch's steps are known only when the data is read")
        parameter = torch.nn.Parameter(torch.zeros(1))
        self._optimizer = torch.optim.SGD([parameter], lr=lr)
        self._made = None if sched is None else registry.make_scheduler(self._optimizer, {**sched, "max_steps": steps})

    def __call__(self, step: int) -> float:
        if self._made is None:
            return self.lr
        if hasattr(self._made, "rate"):
            return float(self._made.rate(step, self.lr))
        self._made.last_epoch = step
        closed = getattr(self._made, "_get_closed_form_lr", None)
        if closed is None:
            raise ValueError(f"{self.name}: its rates are known only while it runs")
        return float(closed()[0])

    def rows(self) -> list[tuple[int, float]]:
        """(step, rate) where a reader wants to know it."""
        warmup = int(getattr(self._made, "warmup_steps", 0) or 0)
        hold = warmup + int(getattr(self._made, "constant_steps", 0) or 0) if getattr(self._made, "takes_constant_steps", False) else 0
        said = {0, warmup // 2, warmup, warmup + 1, hold, self.steps // 4, self.steps // 2, self.steps * 3 // 4, self.steps - 1}
        return [(step, self(step)) for step in sorted(s for s in said if 0 <= s < self.steps)]

    def curve(self) -> list[tuple[int, float]]:
        """Points of a picture."""
        stride = max(self.steps // POINTS, 1)
        steps = {*range(0, self.steps, stride), self.steps - 1, *(s for s, _ in self.rows())}
        return [(step, self(step)) for step in sorted(steps)]


def of(facts: Facts) -> Rates | None:
    """Of a configuration; None if its schedule cannot be made."""
    optim = facts.get("model.optim")
    if not isinstance(optim, Mapping) or facts.steps < 1:
        return None
    sched = optim.get("sched")
    try:
        found = Rates(float(optim.get("lr") or 0.0), sched if isinstance(sched, Mapping) else None, facts.steps)
        found.rows()
    except (ValueError, TypeError, ZeroDivisionError):
        return None  # rules.optimization says why
    return found


def spark(rates: Rates, width: int = 60) -> str:
    """The curve as one line of text."""
    bars = " ▁▂▃▄▅▆▇█"
    values = [rates(round(k * (rates.steps - 1) / (width - 1))) for k in range(width)]
    top = max(values) or 1.0
    return "".join(bars[min(max(round(v / top * 8), 0), 8)] for v in values)


def plot(rates: Rates, path: str | os.PathLike[str], title: str) -> Path:
    """Write a picture (.svg, or with matplotlib .png and .pdf). Raises ValueError for other endings, ImportError without matplotlib."""
    target = Path(path)
    if target.suffix == ".svg":
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(_svg(rates.curve(), title), encoding="utf-8")
        return target
    if target.suffix not in (".png", ".pdf"):
        raise ValueError(f"{target}: a picture is a file .svg, .png or .pdf")
    os.environ.setdefault("MPLCONFIGDIR", tempfile.gettempdir())
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(f"{target}: .png and .pdf need matplotlib (pip install matplotlib); .svg does not") from error
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.add_subplot()
    points = rates.curve()
    axes.plot([s for s, _ in points], [r for _, r in points])
    axes.set(title=title, xlabel="step", ylabel="learning rate", ylim=(0, None))
    axes.grid(alpha=0.3)
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target)
    return target


def _svg(points: Sequence[tuple[int, float]], title: str) -> str:
    """The curve with its two axes, 800 x 400."""
    left, top, width, height = 90, 40, 680, 300
    last, most = max(points[-1][0], 1), max(r for _, r in points) or 1.0
    line = " ".join(f"{left + width * s / last:.1f},{top + height * (1 - r / most):.1f}" for s, r in points)
    texts = [
        f'<text x="{left + width / 2}" y="24" text-anchor="middle" font-size="16">{title}</text>',
        f'<text x="{left - 8}" y="{top + 5}" text-anchor="end">{most:.2e}</text>',
        f'<text x="{left - 8}" y="{top + height}" text-anchor="end">0</text>',
        f'<text x="{left}" y="{top + height + 20}" text-anchor="middle">0</text>',
        f'<text x="{left + width}" y="{top + height + 20}" text-anchor="middle">{last}</text>',
        f'<text x="{left + width / 2}" y="{top + height + 36}" text-anchor="middle">step</text>',
    ]
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" width="800" height="400" font-family="system-ui,sans-serif" font-size="12">'
        f'<rect width="800" height="400" fill="#fff"/><path d="M{left},{top}V{top + height}H{left + width}" fill="none" stroke="#57606a"/>'
        f'<polyline points="{line}" fill="none" stroke="#0969da" stroke-width="2"/>{"".join(texts)}</svg>\n'
    )
