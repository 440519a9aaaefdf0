"""The step timeline of a profile as a picture: what the host did, and what each device ran, over time."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from nxd_jax.inspect import units
from nxd_jax.inspect.pictures import figures
from nxd_jax.inspect.pictures.shortening import Cut, shortened
from nxd_jax.inspect.profiling.attribution import merged, overlap
from nxd_jax.inspect.profiling.results import COMPILER, FOREIGN, OUTSIDE, DeviceSpan, Profile
from nxd_jax.inspect.profiling.watching import PHASES

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HOST_COLORS = {"record": "#b9c4d3", "prepare": "#7f8da3", "compile": "#c4392f", "dispatch": "#333f50", "wait": "#eceff3"}
PHASE_COLORS = {
    "forward": "#4c78a8",
    "backward": "#f28e2b",
    "optimizer": "#b07aa1",
    "other": "#8a8f98",
    "compiler": "#c9ccd1",
    "foreign": "#e3d5b8",
}
GROUP_COLORS = ("#4c78a8", "#f28e2b", "#59a14f", "#e15759", "#17a2b8", "#edc948", "#9c755f", "#d37295")
OTHERS = "other modules"
SPECIAL_COLORS = {"optimizer": "#b07aa1", OUTSIDE: "#8a8f98", COMPILER: "#c9ccd1", FOREIGN: "#e3d5b8", OTHERS: "#6b6f76"}

MOST_LANES = 40
"""Lanes of a picture; the devices beyond share one, which shows how busy they are on average."""
MOST_HOST_LANES = 4
_LABELLED_STEPS = 24
_BINS = 600


def timeline_picture(profile: Profile, path: str | os.PathLike[str] | None = None, by: str = "module") -> Figure:
    """The timeline of a profile as a `matplotlib.figure.Figure`; a notebook shows it.

    profile: of `nxd_jax.inspect.profile`. path: a file to write it to as well, of the kind that its suffix says (.png, .svg, .pdf). by: the colour of what a
    device runs: "module" (the first parts of the module path, with so many that at most eight colours are needed; backward is darker) or "phase" (forward,
    backward, optimizer). Compilations that would fill the picture are drawn short, with what they took. A lane for each thread of the host that
    runs programs and for each device, up to 40 lanes; vertical lines are the ends of steps.

    Raises ValueError for a profile whose block has not ended, for another `by`, or for a file name that is no picture's; ImportError without matplotlib.
    """
    if by not in ("module", "phase"):
        raise ValueError(f'by must be "module" or "phase", got {by!r}')
    if not profile.done:
        raise ValueError("this profile is not there yet: it is read when its `with` block ends, so draw it after the block")
    figures.checked(path)
    headline = profile.headline()
    profile, cuts = shortened(profile)
    every = list(dict.fromkeys(s.thread for s in profile.host_spans))
    threads = every[:MOST_HOST_LANES]
    devices = [r.device for r in profile.devices]
    alone = devices if len(threads) + len(devices) <= MOST_LANES else devices[: MOST_LANES - len(threads) - 1]
    lanes = [*(("host" if t == "main" else t) for t in threads), *alone]
    rest = devices[len(alone) :]
    if rest:
        lanes.append(f"{len(rest)} more")
    each = 0.34 if len(lanes) <= 12 else 0.22
    figure = figures.figure(12, 1.9 + each * max(len(lanes), 1))
    axes = figure.add_subplot()
    scale, unit = _unit(profile.seconds)
    host = _host_lanes(axes, profile, threads, scale)
    colors = _device_lanes(axes, profile, alone, len(threads), by, scale)
    if rest:
        _shared_lane(axes, profile, rest, len(lanes) - 1, scale)
    _steps(axes, profile, scale)
    _cuts(axes, cuts, scale)
    left = len(every) - len(threads)
    about = f"; compilations, {units.seconds(sum(c.seconds for c in cuts))}, are drawn short" if cuts else ""
    _frame(axes, profile, lanes, scale, unit + about + (f"; {left} more threads of the host are not shown" if left else ""), headline)
    names = groups(profile.device_spans)
    if rest:
        colors[f"{len(rest)} more: darker where more of them are busy"] = "#55595f"
    _legends(figure, host, colors, {names[s.module] for s in profile.device_spans if s.phase == "backward" and by == "module"})
    return figures.finished(figure, path)


def _unit(seconds: float) -> tuple[float, str]:
    for size, unit in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= 2 * size:
            return 1 / size, unit
    return 1e6, "us"


def _bars(axes: Any, lane: int, spans: Sequence[tuple[float, float]], color: Any, scale: float, height: float = 0.8) -> None:
    """Spans (start, end in seconds) of one colour in a lane. The edge keeps the shortest visible."""
    bars = [(start * scale, (end - start) * scale) for start, end in spans]
    axes.broken_barh(bars, (lane - height / 2, height), facecolors=color, edgecolors=color, linewidth=0.25)


def _host_lanes(axes: Any, profile: Profile, threads: Sequence[str], scale: float) -> dict[str, Any]:
    """Draw the host; the colours used, by phase."""
    for lane, thread in enumerate(threads):
        for phase in PHASES:
            spans = [(s.start, s.end) for s in profile.host_spans if s.thread == thread and s.phase == phase]
            if spans:
                _bars(axes, lane, spans, HOST_COLORS[phase], scale)
    used = {s.phase for s in profile.host_spans if s.thread in threads}
    return {phase: HOST_COLORS[phase] for phase in PHASES if phase in used}


def _device_lanes(axes: Any, profile: Profile, devices: Sequence[str], first: int, by: str, scale: float) -> dict[str, Any]:
    """Draw the devices from lane `first` on; the colours used, by what they stand for."""
    names = groups(profile.device_spans)
    colors = group_colors(profile.device_spans, names) if by == "module" else PHASE_COLORS
    bars: dict[tuple[int, str, bool], list[tuple[float, float]]] = defaultdict(list)
    places = {device: first + k for k, device in enumerate(devices)}
    used = set()
    for s in profile.device_spans:
        if s.device in places:
            key = _key(s, names) if by == "module" else s.phase
            used.add(key)
            bars[places[s.device], key, by == "module" and s.phase == "backward"].append((s.start, s.end))
    for (lane, key, dark), spans in bars.items():
        _bars(axes, lane, spans, darker(colors[key]) if dark else colors[key], scale)
    return {key: color for key, color in colors.items() if key in used}


def _key(span: DeviceSpan, names: dict[str, str]) -> str:
    return "optimizer" if span.phase == "optimizer" and span.module == OUTSIDE else names[span.module]


def groups(spans: Sequence[DeviceSpan], most: int = len(GROUP_COLORS)) -> dict[str, str]:
    """What each module counts as: as many first parts of its path as give at most `most` groups, numbers of layers left out ('*'). Of more even by the first
    part alone, those with the least time are "other modules"."""
    seconds: dict[str, float] = defaultdict(float)
    for s in spans:
        seconds[s.module] += s.end - s.start
    paths = {m: tuple("*" if part.isdigit() else part for part in m.split(".")) for m in seconds if m not in (COMPILER, FOREIGN, OUTSIDE)}
    found = {m: m for m in seconds if m not in paths}
    for depth in range(max(map(len, paths.values()), default=1), 0, -1):
        cut = {m: ".".join(path[:depth]) for m, path in paths.items()}
        if len(set(cut.values())) <= most or depth == 1:
            break
    else:
        cut = {}
    sums: dict[str, float] = defaultdict(float)
    for m, group in cut.items():
        sums[group] += seconds[m]
    ranked = sorted(sums, key=lambda group: -sums[group])
    kept = set(ranked if len(ranked) <= most else ranked[: most - 1])
    return {**found, **{m: group if group in kept else OTHERS for m, group in cut.items()}}


def group_colors(spans: Sequence[DeviceSpan], names: dict[str, str]) -> dict[str, str]:
    """A colour for each group, in the order in which they run first; the special ones last."""
    ordered = list(dict.fromkeys(names[s.module] for s in sorted(spans, key=lambda s: s.start)))
    plain = [group for group in ordered if group not in SPECIAL_COLORS]
    return {**dict(zip(plain, GROUP_COLORS, strict=False)), **SPECIAL_COLORS}


def darker(color: str) -> tuple[float, float, float]:
    """The colour of the backward pass of a group."""
    red, green, blue = (int(color[i : i + 2], 16) / 255 for i in (1, 3, 5))
    return 0.6 * red, 0.6 * green, 0.6 * blue


def _shared_lane(axes: Any, profile: Profile, devices: Sequence[str], lane: int, scale: float) -> None:
    """How busy the devices without a lane of their own are: the darker, the more of them."""
    edges = np.linspace(0.0, profile.seconds, _BINS + 1)
    spans: dict[str, list[tuple[float, float]]] = {device: [] for device in devices}
    for s in profile.device_spans:
        if s.device in spans:
            spans[s.device].append((s.start, s.end))
    unions = [merged(each) for each in spans.values()]
    width = edges[1] or 1.0
    busy = [sum(overlap(u, a, b) for u in unions) / (width * len(unions)) for a, b in pairwise(edges)]
    axes.imshow(
        np.array([busy]),
        aspect="auto",
        cmap="Greys",
        vmin=0,
        vmax=1.5,
        extent=(0, profile.seconds * scale, lane - 0.4, lane + 0.4),
        zorder=1,
    )


def _steps(axes: Any, profile: Profile, scale: float) -> None:
    """A line at the end of each step, and its number above the picture."""
    ends = [r.start + r.seconds for r in profile.steps]
    for end in ends:
        axes.axvline(end * scale, color="#1b1f24", linewidth=0.8, alpha=0.75, zorder=3)
    every = -(-len(ends) // _LABELLED_STEPS) if ends else 1
    wide = [r for r in profile.steps if r.seconds >= profile.seconds / (_LABELLED_STEPS * 1.5)]
    for r in wide[::every]:
        middle = (r.start + r.seconds / 2) * scale
        label = f"step {r.number}" if len(wide) <= _LABELLED_STEPS // 2 else str(r.number)
        axes.annotate(
            label, (middle, 1.0), xycoords=("data", "axes fraction"), xytext=(0, 3), textcoords="offset points", ha="center", fontsize=8
        )


def _cuts(axes: Any, cuts: Sequence[Cut], scale: float) -> None:
    """What was drawn short, through all lanes, with the time that it took."""
    for cut in cuts:
        axes.axvspan(
            cut.start * scale, cut.end * scale, facecolor="none", edgecolor=HOST_COLORS["compile"], hatch="///", linewidth=0, alpha=0.5
        )
        middle = (cut.start + cut.end) / 2 * scale
        axes.annotate(units.seconds(cut.seconds), (middle, 0), ha="center", va="center", fontsize=8, color="white", fontweight="bold")


def _frame(axes: Any, profile: Profile, lanes: Sequence[str], scale: float, unit: str, headline: str) -> None:
    count = max(len(lanes), 1)
    axes.set_ylim(count - 0.45, -0.55)
    axes.set_xlim(0, max(profile.seconds * scale, 1e-9))
    axes.set_yticks(range(len(lanes)), lanes, fontsize=9 if len(lanes) <= 24 else 7.5)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=9)
    axes.set_xlabel(f"time in {unit}", fontsize=9)
    axes.set_title(headline, fontsize=10.5, loc="left", pad=18)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    if not profile.device_spans:
        text = "\n".join(profile.notes) or f"nothing ran on a device in {units.seconds(profile.seconds)}"
        axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", fontsize=9, wrap=True)


def _legends(figure: Any, host: dict[str, Any], groups: dict[str, Any], dark: set[str]) -> None:
    """One legend below: the host's phases, then the devices' colours; with two shades for a group with a backward pass."""
    from matplotlib.legend_handler import HandlerTuple
    from matplotlib.patches import Patch

    entries: list[tuple[Any, str]] = [(Patch(facecolor=color), f"host: {phase}") for phase, color in host.items()]
    for name, color in groups.items():
        both = Patch(facecolor=color), Patch(facecolor=darker(color))
        entries.append((both, f"{name} (forward, backward)") if name in dark else (both[0], name))
    if entries:
        handles, labels = zip(*entries, strict=True)
        pair = {tuple: HandlerTuple(ndivide=None, pad=0)}
        figure.legend(
            handles,
            labels,
            loc="outside lower left",
            ncols=5,
            fontsize=8,
            frameon=False,
            handlelength=1.6,
            columnspacing=1.4,
            handler_map=pair,
        )
