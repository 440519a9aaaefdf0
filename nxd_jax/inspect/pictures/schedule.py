"""A pipeline step as a picture: a lane for each rank, a box for each computation, and below how many activations ranks keep."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from nxd_jax.inspect.pictures.figures import INK, MUTED, checked, figure, finished
from nxd_jax.pipeline.schedules import Kind, Timeline

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = {
    Kind.FORWARD: ("#4c78a8", "forward"),
    Kind.BACKWARD: ("#f28e2b", "backward"),
    Kind.INPUT_BACKWARD: ("#e7b04c", "backward of the input"),
    Kind.WEIGHT_BACKWARD: ("#6aa84f", "backward of the weights"),
}
"""And what the legend says. Later chunks of a rank are lighter."""
_NUMBERED = 600
"""Boxes up to which each has its micro-batch's number."""


def schedule_picture(timeline: Timeline, path: str | os.PathLike[str] | None = None) -> Figure:
    """The timeline of a schedule as a `matplotlib.figure.Figure`; a notebook shows it.

    Each lane is a rank, each box a computation with its micro-batch; later chunks of a rank are lighter; white is idle time. The second part shows how many
    activations the ranks keep over time. path: a file to write it to as well (.png, .svg, .pdf). Raises ValueError for another kind of file, ImportError
    without matplotlib.
    """
    checked(path)
    plan = timeline.schedule
    boxes = sum(map(len, timeline.tasks))
    made = figure(min(max(6.0, boxes / plan.ranks * 0.3), 16.0), 1.8 + 0.34 * plan.ranks + 1.2)
    lanes, kept = made.subplots(2, 1, sharex=True, height_ratios=[plan.ranks + 0.5, max(2.5, 0.4 * plan.ranks)])
    for rank, tasks in enumerate(timeline.tasks):
        own = plan.stages_of(rank)
        for task in tasks:
            colour = COLOURS[task.action.kind][0]
            lighter = 0.6 * own.index(task.action.stage) / max(len(own) - 1, 1) if len(own) > 1 else 0.0
            lanes.barh(rank, task.end - task.start, 0.86, task.start, color=_mixed(colour, lighter), edgecolor="white", linewidth=0.5)
            if boxes <= _NUMBERED:
                middle = (task.start + task.end) / 2
                lanes.text(
                    middle,
                    rank,
                    str(task.action.microbatch),
                    ha="center",
                    va="center",
                    fontsize=6.5,
                    color=INK if lighter > 0.3 else "white",
                )
    lanes.set_yticks(range(plan.ranks), [f"rank {rank}" for rank in range(plan.ranks)])
    lanes.invert_yaxis()
    lanes.set_xlim(0, timeline.end)
    lanes.set_title(
        f"{plan.name}: {plan.stages} stages on {plan.ranks} ranks, {plan.microbatches} micro-batches, {timeline.idle_share:.1%} idle",
        loc="left",
        color=INK,
    )
    _legend(lanes, {task.action.kind for tasks in timeline.tasks for task in tasks})
    for rank in range(plan.ranks):
        steps = [(0.0, 0), *timeline.live(rank), (timeline.end, 0)]
        shade = 0.75 * rank / max(plan.ranks - 1, 1)
        kept.step([time for time, _ in steps], [held for _, held in steps], where="post", color=_mixed("#333f50", shade), linewidth=1.1)
    kept.set_ylabel("activations\nkept", color=MUTED)
    kept.set_xlabel("time", color=MUTED)
    kept.set_ylim(bottom=0)
    kept.yaxis.get_major_locator().set_params(integer=True)
    for part in (lanes, kept):
        part.spines[["top", "right"]].set_visible(False)
    return finished(made, path)


def _mixed(colour: str, white: float) -> tuple[float, float, float]:
    """A colour with so much white in it, 0 to 1."""
    red, green, blue = (int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5))
    return red + (1 - red) * white, green + (1 - green) * white, blue + (1 - blue) * white


def _legend(axes: Any, kinds: set[Kind]) -> None:
    from matplotlib.patches import Patch

    shown = [Patch(color=colour, label=label) for kind, (colour, label) in COLOURS.items() if kind in kinds]
    axes.legend(handles=shown, ncols=len(shown), loc="lower right", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=8)
