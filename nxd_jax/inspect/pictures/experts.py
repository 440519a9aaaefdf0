"""Experts as a picture: a heat map of layers and experts, imbalance and dropped share beside it, and below how both went over the steps."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from nxd_jax.inspect.pictures.figures import INK, MUTED, checked, figure, finished

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from nxd_jax.inspect.experts import ExpertTable

COLD, EVEN, HOT = "#3f6fa3", "#f7f7f5", "#b2182b"
"""An expert without tokens, one with the mean, and one with twice the mean or more."""
DROPPED = "#d9a516"
_MOST_NAMES = 40
_NUMBERED = 12
"""Up to so many experts have their numbers in the map."""


def experts_picture(table: ExpertTable, path: str | os.PathLike[str] | None = None) -> Figure:
    """What `inspect.experts` found, as a `matplotlib.figure.Figure`; a notebook shows it.

    Each row is a layer, each column an expert, coloured by its tokens over the mean: white for the mean, red for more (full red: twice or more), blue for less;
    layers with fewer experts end earlier. Beside it the busiest expert's tokens over the mean, and the share of choices that were dropped. With the steps of a
    `load.LoadLog`, the lower part shows both in each step: a thin line for each layer, a thick one for the worst.

    path: a file to write it to as well (.png, .svg, .pdf). Raises ValueError for another kind of file and for a table without layers, ImportError without
    matplotlib.
    """
    checked(path)
    rows = table.rows
    if not rows:
        raise ValueError("there are no experts to draw: the MoE layers are in other processes, with other stages of the pipeline")
    layers, experts = len(rows), max((len(row.tokens) for row in rows), default=1)
    width = min(max(8.0, 4.6 + 0.34 * experts), 15.0)
    upper = min(max(1.1, 0.34 * layers + 0.5), 9.0)
    several = len(table.steps) > 1
    made = figure(width, upper + 0.9 + (2.4 if several else 0.0))
    parts: Any = made.subfigures(2, 1, height_ratios=[upper + 0.9, 2.4]) if several else [made]
    heat, imbalance, dropped = parts[0].subplots(1, 3, sharey=True, width_ratios=[max(width - 4.6, 3.0), 1.1, 1.1])
    _map(parts[0], heat, table)
    _bars(imbalance, [row.imbalance for row in rows], "busiest / mean", "{:.2f}".format, HOT, 1.0)
    _bars(dropped, [row.dropped_share for row in rows], "dropped", "{:.1%}".format, DROPPED, 0.0)
    parts[0].suptitle(table.note, fontsize=10, color=INK)
    if several:
        _run(parts[1], table)
    return finished(made, path)


def _map(part: Any, axes: Any, table: ExpertTable) -> None:
    from matplotlib.colors import LinearSegmentedColormap

    rows = table.rows
    experts = max((len(row.tokens) for row in rows), default=1)
    values = np.full((len(rows), experts), np.nan)
    for place, row in enumerate(rows):
        values[place, : len(row.tokens)] = row.relative
    colours = LinearSegmentedColormap.from_list("experts", [COLD, EVEN, HOT])
    drawn = axes.imshow(values, cmap=colours, vmin=0, vmax=2, aspect="auto", interpolation="nearest")
    drawn.set_gid("experts")
    if experts <= _NUMBERED and len(rows) <= _MOST_NAMES:
        for (y, x), value in np.ndenumerate(values):
            if not math.isnan(value):
                axes.text(x, y, f"{value:.2f}", ha="center", va="center", fontsize=7.5, color="white" if abs(value - 1) > 0.75 else INK)
    step = -(-len(rows) // _MOST_NAMES)
    axes.set_yticks(range(0, len(rows), step), [row.layer or "the model" for row in rows[::step]], fontsize=8)
    every = max(1, -(-experts // 16))
    axes.set_xticks(range(0, experts, every))
    axes.tick_params(length=0, labelsize=8)
    axes.set_xlabel("expert", fontsize=9, color=MUTED)
    axes.spines[:].set_visible(False)
    bar = part.colorbar(drawn, ax=axes, location="left", shrink=0.9, aspect=14, pad=0.01, ticks=[0, 1, 2])
    bar.ax.set_yticklabels(["0", "mean", "2x"], fontsize=7.5)
    bar.outline.set_visible(False)


def _bars(axes: Any, values: Sequence[float], title: str, show: Any, colour: str, start: float) -> None:
    """A bar for each layer from `start`, with its value."""
    lengths = [0.0 if math.isnan(v) else v - start for v in values]
    axes.barh(range(len(values)), lengths, left=start, height=0.62, color=colour, gid=title)
    far = max([*lengths, 1e-9])
    axes.set_xlim(start, start + 1.75 * far if far > 1e-9 else start + 1.0)
    for place, (value, length) in enumerate(zip(values, lengths, strict=True)):
        text = "-" if math.isnan(value) else show(value)
        axes.text(start + length + 0.05 * far, place, text, va="center", fontsize=8, color=INK, gid=f"{title} {place}")
    axes.set_title(title, fontsize=9, color=MUTED, loc="left")
    axes.set_xticks([])
    axes.tick_params(axis="y", length=0, labelleft=False)
    axes.spines[["top", "right", "bottom"]].set_visible(False)


def _run(part: Any, table: ExpertTable) -> None:
    """Imbalance and dropped share in each step."""
    steps = [step.step for step in table.steps]
    left, right = part.subplots(1, 2, width_ratios=[1.5, 1.0])
    for axes, what, key, colour in (
        (left, "busiest / mean, by step", "imbalance", HOT),
        (right, "dropped, by step", "dropped_share", DROPPED),
    ):
        lines = np.array([[getattr(s, key) for s in step.layers.values()] for step in table.steps], dtype=float)
        if lines.shape[1] > 1:
            axes.plot(steps, lines, color=colour, alpha=0.35, linewidth=0.8)
        known = ~np.isnan(lines).all(1)
        worst = np.full(len(steps), np.nan)
        worst[known] = np.nanmax(lines[known], axis=1)
        axes.plot(steps, worst, color=colour, linewidth=1.8, gid=f"worst {key}")
        axes.set_title(what, fontsize=9, color=MUTED, loc="left")
        axes.set_xlabel("step", fontsize=9, color=MUTED)
        axes.tick_params(labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    left.axhline(1.0, color=MUTED, linewidth=0.8)
    left.set_ylim(bottom=0.95)
    right.set_ylim(bottom=0)
    right.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    if not any(s.dropped for step in table.steps for s in step.layers.values()):
        right.text(0.5, 0.5, "nothing is dropped", transform=right.transAxes, ha="center", fontsize=9, color=MUTED)
        right.set_ylim(0, 1)
