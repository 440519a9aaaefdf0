"""A pipeline step as a picture: a lane for each rank, a box for each computation, and below what ranks keep for their backward passes."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from nxd_jax.inspect.pictures.figures import INK, MUTED, checked, figure, finished
from nxd_jax.pipeline.schedules import Kind, Timeline

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = {
    Kind.FORWARD: ("#3f6fa3", "forward (F)"),
    Kind.BACKWARD: ("#e8781c", "backward (B)"),
    Kind.INPUT_BACKWARD: ("#d9a516", "backward of the input (I)"),
    Kind.WEIGHT_BACKWARD: ("#5b9a46", "backward of the weights (W)"),
}
"""And what the legend says. Later chunks of a rank are lighter."""
IDLE, KEPT = "#d5d9de", "#8d6bab"
_LIGHTEST = 0.62
_WIDEST, _UNIT = 16.0, 0.3
"""Inches: of a picture, and of the shortest box where there is room."""
_MARGINS = 1.7
"""Inches beside the lanes, for names and numbers."""
_SMALLEST, _LARGEST = 4.8, 7.5
"""Points that numbers of micro-batches have; a box that is too narrow for the smallest has none."""
_MOST_NUMBERS = 2500

Kept = Sequence[Sequence[tuple[float, float]]]
"""By rank, (time, what it keeps from then on)."""


class Measure(NamedTuple):
    """What the lower part shows. kept: by rank; what: its name; show: how a peak is written."""

    kept: Kept
    what: str = "activations kept"
    show: Callable[[float], str] = "{:g}".format


def schedule_picture(timeline: Timeline, path: str | os.PathLike[str] | None = None, until: float | None = None) -> Figure:
    """The timeline of a schedule as a `matplotlib.figure.Figure`; a notebook shows it.

    Each lane is a rank, each box a computation with its micro-batch; later chunks of a rank are lighter; hatched is idle time, its share stands at the right.
    The lower part shows how many activations each rank keeps over time, all to one scale, with the most of each. path: a file to write it to as well (.png,
    .svg, .pdf). until: where time ends, so that several pictures have one scale; default: with the step.

    Raises ValueError for another kind of file and for an `until` before the step's end, ImportError without matplotlib.
    """
    plan = timeline.schedule
    title = f"{plan.name}: {plan.stages} stages on {plan.ranks} ranks, {plan.microbatches} micro-batches, {timeline.idle_share:.1%} idle"
    measure = Measure([timeline.live(rank) for rank in range(plan.ranks)])
    return drawn(timeline, measure, title, "time", path=path, until=until)


def drawn(
    timeline: Timeline,
    measure: Measure,
    title: str,
    axis: str,
    scale: float = 1.0,
    path: str | os.PathLike[str] | None = None,
    until: float | None = None,
) -> Figure:
    """A timeline with what ranks keep. axis: what stands at the axis of time, which shows times multiplied by `scale`. The rest is as in `schedule_picture`."""
    checked(path)
    if until is not None and until < timeline.end:
        raise ValueError(f"until={until:g} is before the end of the step, {timeline.end:g}: give that or more")
    ranks, end = timeline.schedule.ranks, timeline.end if until is None else until
    tasks = [task for found in timeline.tasks for task in found]
    shortest = sorted(task.end - task.start for task in tasks)[len(tasks) // 10]
    width = min(max(7.0, end / shortest * _UNIT + _MARGINS if shortest else 0.0), _WIDEST)
    lane, ridge = (0.36, 0.3) if ranks <= 8 else (0.27, 0.2)
    made = figure(width, 1.5 + (lane + ridge) * ranks)
    upper, lower = made.subplots(2, 1, sharex=True, height_ratios=[lane * ranks, ridge * ranks])
    for rank, found in enumerate(timeline.tasks):
        _idle(upper, rank, [(task.start * scale, task.end * scale) for task in found], timeline.end * scale)
    chunks = _boxes(upper, timeline, scale)
    _numbers(upper, timeline, scale, 72 * (width - _MARGINS) / end if end else 0.0)
    shares = [f"{timeline.idle(rank) / timeline.end:.1%} idle" if timeline.end else "" for rank in range(ranks)]
    peaks = _ridges(lower, measure, timeline.end, scale)
    for part, marks, first in (upper, shares, 0.0), (lower, [measure.show(peak) for peak in peaks], 0.45):
        _lanes(part, ranks, marks, first)
    upper.set_xlim(0, end * scale or 1.0)
    upper.tick_params(axis="x", length=0)
    lower.set_xlabel(axis, fontsize=9, color=MUTED)
    lower.set_title(f"{measure.what}, and the most of each rank", loc="left", fontsize=9, color=MUTED)
    upper.set_title(title, loc="left", fontsize=10.5, color=INK)
    _legend(made, {task.action.kind for task in tasks}, chunks)
    return finished(made, path)


def _lanes(axes: Any, ranks: int, marks: Sequence[str], first: float) -> None:
    """Names at the left, marks at the right."""
    size = 9 if ranks <= 8 else 7.5
    axes.set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)], fontsize=size)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=8)
    axes.set_ylim(ranks - 0.5, -0.5 - first)
    for rank, mark in enumerate(marks):
        axes.text(1.006, rank, mark, transform=axes.get_yaxis_transform(), va="center", fontsize=size - 1, color=INK, gid=f"mark {rank}")
    axes.spines[["top", "right", "left"]].set_visible(False)


def _idle(axes: Any, rank: int, busy: Sequence[tuple[float, float]], end: float) -> None:
    """Hatch the time in which a rank does nothing."""
    borders = [(0.0, 0.0), *busy, (end, end)]
    gaps = [(before, after - before) for (_, before), (after, _) in pairwise(borders) if after - before > 1e-9 * end]
    axes.broken_barh(gaps, (rank - 0.41, 0.82), facecolors="none", edgecolors=IDLE, hatch="/////", linewidth=0.0, gid=f"idle {rank}")


def _boxes(axes: Any, timeline: Timeline, scale: float) -> int:
    """A box for each computation; how many chunks the rank with the most has."""
    plan = timeline.schedule
    most = max(len(plan.stages_of(rank)) for rank in range(plan.ranks))
    for rank, tasks in enumerate(timeline.tasks):
        own = plan.stages_of(rank)
        bars: dict[tuple[Kind, int], list[tuple[float, float]]] = {}
        for task in tasks:
            bars.setdefault((task.action.kind, own.index(task.action.stage)), []).append(
                (task.start * scale, (task.end - task.start) * scale)
            )
        for (kind, chunk), spans in bars.items():
            axes.broken_barh(
                spans,
                (rank - 0.41, 0.82),
                facecolors=mixed(COLOURS[kind][0], _white(chunk, most)),
                edgecolors="white",
                linewidth=0.4,
                gid=f"rank {rank} {kind.value} {chunk}",
            )
    return most


def _white(chunk: int, chunks: int) -> float:
    return _LIGHTEST * chunk / max(chunks - 1, 1)


def _numbers(axes: Any, timeline: Timeline, scale: float, points: float) -> None:
    """The micro-batch in each box that is wide enough. points: of a unit of time."""
    plan = timeline.schedule
    fits = []
    for rank, tasks in enumerate(timeline.tasks):
        own = plan.stages_of(rank)
        for task in tasks:
            text = str(task.action.microbatch)
            size = min((task.end - task.start) * points / (0.72 * len(text)), _LARGEST)
            if size >= _SMALLEST:
                light = _white(own.index(task.action.stage), len(own)) > 0.3
                fits.append(((task.start + task.end) / 2 * scale, rank, text, size, INK if light else "white"))
    for x, y, text, size, colour in fits if len(fits) <= _MOST_NUMBERS else ():
        axes.text(x, y, text, ha="center", va="center_baseline", fontsize=size, color=colour, in_layout=False)


def _ridges(axes: Any, measure: Measure, end: float, scale: float) -> list[float]:
    """What each rank keeps over time, on one scale, with a dot where it is most first; the peaks."""
    peaks = [max((held for _, held in found), default=0.0) for found in measure.kept]
    top = max(peaks, default=0.0) or 1.0
    for rank, found in enumerate(measure.kept):
        steps = [(0.0, 0.0), *found, (end, 0.0)]
        base = rank + 0.44
        times = [time * scale for time, _ in steps]
        heights = [base - 0.84 * held / top for _, held in steps]
        axes.fill_between(times, heights, base, step="post", facecolor=KEPT, alpha=0.55, linewidth=0.0)
        axes.step(times, heights, where="post", color=KEPT, linewidth=0.9, gid=f"kept {rank}")
        if peaks[rank]:
            most = next(time for time, held in found if held == peaks[rank])
            axes.plot([most * scale], [base - 0.84 * peaks[rank] / top], "o", color=INK, markersize=2.6, gid=f"peak {rank}")
    return peaks


def mixed(colour: str, white: float) -> tuple[float, float, float]:
    """A colour with so much white in it, 0 to 1."""
    red, green, blue = (int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5))
    return red + (1 - red) * white, green + (1 - green) * white, blue + (1 - blue) * white


def _legend(made: Figure, kinds: set[Kind], chunks: int) -> None:
    """A patch for each kind, in the shades of all chunks; idle time."""
    from matplotlib.legend_handler import HandlerTuple
    from matplotlib.patches import Patch

    entries: list[tuple[Any, str]] = []
    for kind, (colour, label) in COLOURS.items():
        if kind in kinds:
            entries.append((tuple(Patch(facecolor=mixed(colour, _white(chunk, chunks))) for chunk in range(chunks)), label))
    entries.append((Patch(facecolor="none", edgecolor="#aab1b9", hatch="/////", linewidth=0.0), "idle"))
    if chunks > 1:
        entries.append((Patch(facecolor="none"), f"dark to light: chunks 0 to {chunks - 1} of a rank"))
    handles, labels = zip(*entries, strict=True)
    made.legend(
        handles,
        labels,
        loc="outside lower left",
        ncols=len(entries),
        fontsize=8,
        frameon=False,
        handlelength=1.4,
        columnspacing=1.4,
        handler_map={tuple: HandlerTuple(ndivide=None, pad=0)},
    )
