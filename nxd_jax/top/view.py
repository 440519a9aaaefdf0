"""The picture of the jobs: a panel for each, fitted into the terminal."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.text import Text

from nxd_jax.top.cells import LEVELS, Cell, cells, grid, rows, size, spans
from nxd_jax.top.jobs import GONE, Job
from nxd_jax.top.records import Record

_COLOURS = {
    "running": "green",
    "compiling": "yellow",
    "idle": "blue",
    "stopped": "magenta",
    "silent": "magenta",
    "crashed": "red",
    "ended": "bright_black",
}
_FRAME = 4
"""Characters of a panel's two borders and the space inside them."""
_DETAILS = 4
"""Lines of a panel above its cores."""
NONE = "No job is running. Start one: nxd-run --instance trn1.32xlarge script.py"


def screen(
    jobs: Sequence[Job], width: int, height: int | None = None, ascii_only: bool = False, now: float | None = None
) -> RenderableType:
    """The jobs as something that a rich console of this width prints in at most `height` lines (None: as many as it takes).

    ascii_only: without characters that such terminals lack. now: seconds since the epoch.
    """
    now = time.time() if now is None else now
    if not jobs:
        return _line(Text(NONE))
    shown, more = _that_fit(jobs, height)
    left = None if height is None else height - (1 if more else 0)
    levels = _levels(shown, width, left)
    drawn: list[RenderableType] = [
        _panel(job, level, width, ascii_only, now) if level else _one_line(job, now, ascii_only)
        for job, level in zip(shown, levels, strict=True)
    ]
    if more:
        drawn.append(_line(Text(f"and {more} more", style="dim")))
    return Group(*drawn)


def heading(jobs: Sequence[Job], now: float) -> Text:
    """The line above the jobs."""
    cores = sum(len(job.cores) for job in jobs if job.state not in GONE)
    clock = time.strftime("%H:%M:%S", time.localtime(now))
    return _line(Text(f"nxd-top {clock}", style="bold").append(f"  {_many(len(jobs), 'job')}, {_many(cores, 'core')}", style="not bold"))


# -- fitting ---------------------------------------------------------------------------------------


def _that_fit(jobs: Sequence[Job], height: int | None) -> tuple[Sequence[Job], int]:
    """The jobs for which there is a line at least, and how many there are besides."""
    if height is None or len(jobs) <= height:
        return jobs, 0
    fitting = max(0, height - 1)
    return jobs[:fitting], len(jobs) - fitting


def _levels(jobs: Sequence[Job], width: int, height: int | None) -> list[str]:
    """What each job's cells stand for ('': the job is one line), so that all fit: the job that takes most lines gets coarser first."""
    heights = [[*(2 + _DETAILS + rows(cells(job, level), width - _FRAME) for level in LEVELS), 1] for job in jobs]
    chosen = [0] * len(jobs)
    while height is not None and sum(h[c] for h, c in zip(heights, chosen, strict=True)) > height:
        k = max(range(len(jobs)), key=lambda i: heights[i][chosen[i]])
        if chosen[k] == len(LEVELS):
            break
        chosen[k] += 1
    return [(*LEVELS, "")[c] for c in chosen]


# -- one job ---------------------------------------------------------------------------------------


def _panel(job: Job, level: str, width: int, ascii_only: bool, now: float) -> Panel:
    found: list[Cell] = cells(job, level)
    lines = [_line(text) for text in (*_details(job, ascii_only, now), *grid(found, width - _FRAME, ascii_only))]
    colour = _COLOURS[job.state]
    title = Text(f"{job.record.script} ", style="bold").append(_state(job), style=colour).append(f" {_pids(job)}", style="not bold")
    return Panel(Group(*lines), title=title, title_align="left", border_style=colour, width=width)


def _one_line(job: Job, now: float, ascii_only: bool) -> Text:
    mark = _separator(ascii_only)
    start = Text(f"{job.record.script} ", style="bold").append(_state(job), style=_COLOURS[job.state])
    return _line(start.append(f" {_pids(job)}{mark}world {job.record.world_size}{mark}{_progress(job, mark)}", style="not bold"))


def _details(job: Job, ascii_only: bool, now: float) -> list[Text]:
    """`_DETAILS` lines."""
    record, mark = job.record, _separator(ascii_only)
    until = max(p.gone or 0.0 for p in job.processes) if job.state in GONE else 0.0
    return [
        Text(mark.join([_world(job), _machine(job), f"up {duration((until or now) - record.started)}"])),
        Text(_progress(job, mark)),
        _graph(job, now),
        _compiled(record, mark),
    ]


def _separator(ascii_only: bool) -> str:
    return " | " if ascii_only else " · "


def _state(job: Job) -> str:
    """Such as "running", "crashed: ValueError", "running, 1 of 4 processes crashed"."""
    error = f": {job.error}" if job.error else ""
    dead = [p for p in job.processes if p.gone is not None]
    alive = [p.state for p in job.processes if p.gone is None]
    if dead and alive:
        state = Job(job.name, tuple(p for p in job.processes if p.gone is None)).state
        return f"{state}, {len(dead)} of {len(job.processes)} processes {Job(job.name, tuple(dead)).state}{error}"
    return job.state + error


def _pids(job: Job) -> str:
    pids = [str(p.record.pid) for p in job.processes]
    return f"pid {pids[0]}" if len(pids) == 1 else f"{len(pids)} processes, pids {', '.join(pids[:2])}{', ...' * (len(pids) > 2)}"


def _world(job: Job) -> str:
    record = job.record
    axes = " x ".join(f"{name} {count}" for name, count in record.axes.items() if count > 1)
    here = sum(len(p.record.hosted) for p in job.processes)
    some = f", {spans(sorted(r for p in job.processes for r in p.record.hosted))} here" if here < record.world_size else ""
    return f"world {record.world_size}{': ' * bool(axes)}{axes}{some}"


def _machine(job: Job) -> str:
    record, topology = job.record, job.topology
    if topology is None:
        name = "no known machine"
    else:
        name = topology.instance.name if topology.nodes == 1 else f"{topology.nodes} x {topology.instance.name}"
    return f"{name} on {_many(record.device_count, record.platform + ' device')}" if record.platform else name


def _progress(job: Job, mark: str) -> str:
    record = job.record
    parts = [f"step {record.steps:,}"]
    if record.steps_per_second and job.state not in GONE:
        rate = record.steps_per_second
        parts.append(f"{rate:.3g} steps/s" if rate >= 1 else f"{1 / rate:.3g} s/step")
    cores = job.cores
    busy = sum(core.busy for core in cores) / len(cores) if cores else 0.0
    return mark.join([*parts, f"{record.programs:,} programs", f"busy {busy:.0%}"])


def _graph(job: Job, now: float) -> Text:
    """What is being compiled, or what ran last."""
    for process in job.processes:
        graph = process.record.compiling
        if graph is not None and process.gone is None:
            return Text(f"compiling graph {graph.name} ({_what(graph.ops, graph.source)}) for {duration(now - graph.at)}", style="yellow")
    graph = job.record.graph
    if graph is None:
        return Text("no graph has run yet")
    needs = f", needs {size(graph.core_bytes)}B a core" if graph.core_bytes else ""
    return Text(f"last graph {graph.name} ({_what(graph.ops, graph.source)}{needs}) {duration(now - graph.at)} ago")


def _what(ops: int, source: str) -> str:
    return _many(ops, "op") + (f", {source}" if source else "")


def _compiled(record: Record, mark: str) -> Text:
    disk = f", {record.disk_cache_hits:,} from disk" if record.disk_cache_hits else ""
    text = Text(
        f"{_many(record.compiles, 'graph')} compiled in {duration(record.compile_seconds)}{disk}{mark}reused {record.cache_hits:,} times"
    )
    if record.fallback_ops:
        text.append(f"{mark}{_many(record.fallback_ops, 'op')} fell back to the CPU", style="yellow")
    return text


# -- words -----------------------------------------------------------------------------------------


def duration(seconds: float) -> str:
    """ "0.4 s", "12 s", "3m12s", "2h05m", "3d04h". Never negative: clocks of two processes may differ."""
    seconds = max(0.0, seconds)
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"
    whole = int(seconds)
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02}s"
    return f"{whole // 3600}h{whole // 60 % 60:02}m" if whole < 86400 else f"{whole // 86400}d{whole // 3600 % 24:02}h"


def _many(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def _line(text: Text) -> Text:
    """One line: what is too long ends in dots."""
    text.no_wrap, text.overflow = True, "ellipsis"
    return text
