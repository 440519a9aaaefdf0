"""Memory as bars, against what a core has."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from nxd_jax.inspect import units
from nxd_jax.inspect.pictures.figures import INK, RED, checked, figure, finished

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Bar = tuple[str, Mapping[str, float]]
"""A label and bytes by kind ("parameters", "activations", ...)."""

COLOURS = {
    "parameter": "#4c78a8",
    "gradient": "#f2a541",
    "master weight": "#2b6c7e",
    "optimizer state": "#6aa84f",
    "activations": "#b279a2",
    "temporaries": "#9d9da1",
}
"""Of the usual kinds, the same in every picture; others take from `OTHERS` in their order."""
OTHERS = ("#72b7b2", "#e3ba22", "#8c6d31", "#ff9da6", "#5b8ff9", "#a0cbe8", "#d4a6c8", "#79706e")

_THICK, _THIN = 0.42, 0.2
_MANY = 16
_FAR = 0.1
"""Share of the memory under which bars are drawn to their own scale, with the line outside the picture."""


def memory_picture(
    bars: Sequence[Bar], hbm_bytes: float, title: str = "Memory per core", path: str | os.PathLike[str] | None = None
) -> Figure:
    """Stacked horizontal bars of bytes by kind, one for each core, program or plan, and a line at what a core has.

    A bar that goes over the line has a red frame, and its total says by how much in red. Bars of less than a tenth of the memory are drawn to their own scale;
    the line is outside the picture then, as the legend says.

    Args:
        bars: from top to bottom, (label, bytes by kind). Kinds are stacked in the order in which they first come.
        hbm_bytes: the memory of a core, bytes (`Topology.hbm_per_core`).
        title: above the bars.
        path: of a .png, .svg or .pdf file to save the figure in.

    Raises ValueError for no bars, negative or no finite bytes, a core without memory, and a path with another ending.
    """
    target = checked(path)
    _require(bars, hbm_bytes)
    kinds = list(dict.fromkeys(kind for _, parts in bars for kind in parts))
    others = iter(OTHERS * (1 + len(kinds) // len(OTHERS)))
    colours = {kind: COLOURS.get(kind) or next(others) for kind in kinds}
    totals = [sum(parts.values()) for _, parts in bars]
    widest = max(*totals, hbm_bytes) if max(totals) >= _FAR * hbm_bytes else max(totals) * 1.2 or hbm_bytes
    divisor, unit = _unit(widest)

    made = figure(8.5, 1.5 + len(bars) * (_THICK if len(bars) <= _MANY else _THIN))
    axis = made.subplots()
    for place, (_, parts) in enumerate(bars):
        start = 0.0
        for kind in kinds:
            if parts.get(kind):
                axis.barh(
                    place, parts[kind] / divisor, left=start / divisor, height=0.72, color=colours[kind], edgecolor="white", linewidth=0.6
                )
                start += parts[kind]
    _verdicts(axis, totals, hbm_bytes, divisor)
    axis.axvline(hbm_bytes / divisor, color=INK, linestyle="--", linewidth=1.4, gid="hbm")
    axis.set_yticks(range(len(bars)), [label for label, _ in bars], fontsize=9 if len(bars) <= _MANY else 7)
    axis.set_ylim(len(bars) - 0.4, -0.6)
    axis.set_xlim(0, widest / divisor * 1.04)
    axis.set_xlabel(unit, fontsize=9)
    axis.tick_params(axis="x", labelsize=8)
    axis.spines[["top", "right"]].set_visible(False)
    axis.set_title(title, fontsize=10, loc="left")
    _legend(made, colours, hbm_bytes, far=widest < hbm_bytes)
    return finished(made, target)


def _require(bars: Sequence[Bar], hbm_bytes: float) -> None:
    if not bars:
        raise ValueError("bars is empty: give at least one (label, {kind: bytes})")
    if not 0 < hbm_bytes < float("inf"):
        raise ValueError(f"hbm_bytes={hbm_bytes!r}: a core has more than 0 bytes of memory; Topology.hbm_per_core is that of a core")
    wrong = [f"{label}: {kind} {count!r}" for label, parts in bars for kind, count in parts.items() if not 0 <= count < float("inf")]
    if wrong:
        raise ValueError(f"bytes are at least 0 and finite, but bars has {'; '.join(wrong)}")


def _unit(most: float) -> tuple[float, str]:
    return next(((size, name) for size, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")) if most >= size), (1, "bytes"))


def _verdicts(axis: Any, totals: Sequence[float], hbm_bytes: float, divisor: float) -> None:
    """The totals to the right of the bars; those that are over in red, with a frame around the bar."""
    from nxd_jax.inspect.pictures.figures import rectangle

    size = 8.5 if len(totals) <= _MANY else 6.5
    for place, total in enumerate(totals):
        over = total > hbm_bytes
        text = (
            f"{units.size(total)}, over by {units.size(total - hbm_bytes)}"
            if over
            else f"{units.size(total)}, {units.share(total, hbm_bytes)}"
        )
        axis.text(
            1.015,
            place,
            text,
            transform=axis.get_yaxis_transform(),
            va="center",
            fontsize=size,
            color=RED if over else INK,
            gid=f"total {place}",
        )
        if over:
            frame = rectangle(0, place - 0.36, total / divisor, 0.72, fill=False, edgecolor=RED, linewidth=1.8, zorder=3)
            frame.set_gid(f"over {place}")
            axis.add_patch(frame)


def _legend(made: Figure, colours: Mapping[str, str], hbm_bytes: float, far: bool) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Any] = [Patch(facecolor=c, label=kind) for kind, c in colours.items()]
    handles.append(
        Line2D([], [], color=INK, linestyle="--", label=f"HBM of a core, {units.size(hbm_bytes)}{', outside the picture' * far}")
    )
    made.legend(handles=handles, loc="outside lower center", ncols=min(len(handles), 4), fontsize=8, frameon=False)
