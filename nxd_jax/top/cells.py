"""Cores as cells of a grid: a busy bar and a memory bar for each core, or, where there are too many for the screen, for each chip, machine or job."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.text import Text

from nxd_jax.top.jobs import Core, Job
from nxd_jax.topology import Topology

LEVELS = ("core", "chip", "node", "job")
"""What a cell stands for, finest first."""

_GAP = "  "
_LEAST = (6, 4)
"""Least widths of the busy bar and the memory bar."""
_NUMBERS = 4 + 6 + 4
"""Characters of a cell besides label and bars: "100%", "15.9Gi" and the spaces between its parts."""
_UNITS = (("Ti", 2**40), ("Gi", 2**30), ("Mi", 2**20), ("Ki", 2**10))


@dataclass(frozen=True)
class Cell:
    """Cores shown as one. label: their ranks. busy: their mean. used, limit: bytes of the one that uses most."""

    label: str
    busy: float
    used: int
    limit: int


def cells(job: Job, level: str) -> list[Cell]:
    """The cores of a job at a level of `LEVELS`."""
    topology = job.topology
    groups: dict[object, list[Core]] = {}
    for core in job.cores:
        groups.setdefault(_group(core.rank, topology, level), []).append(core)
    return [_cell(group) for group in groups.values()]


def _group(rank: int, topology: Topology | None, level: str) -> object:
    """What a rank's cell is for. Without a known machine, 8 cores count as a chip and 64 as a node."""
    if level == "core":
        return rank
    if level == "job":
        return None
    if topology is None:
        return rank // (8 if level == "chip" else 64)
    core = topology.cores[rank]
    return (core.node, core.chip) if level == "chip" else core.node


def _cell(cores: Sequence[Core]) -> Cell:
    fullest = max(cores, key=lambda core: core.used)
    return Cell(spans([core.rank for core in cores]), sum(core.busy for core in cores) / len(cores), fullest.used, fullest.limit)


def spans(ranks: Sequence[int]) -> str:
    """Ascending numbers in short: [0, 1, 2, 5] -> "0-2,5"; the first and the last with ".." between if that would be long."""
    starts = [r for r in ranks if r - 1 not in set(ranks)]
    ends = [r for r in ranks if r + 1 not in set(ranks)]
    if len(starts) > 2:
        return f"{ranks[0]}..{ranks[-1]}"
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True))


def size(count: float) -> str:
    """A number of bytes in at most 6 characters, in powers of 1024: "0", "130Ki", "15.9Gi", "16Gi"."""
    for unit, factor in _UNITS:
        if count >= factor:
            value = count / factor
            return f"{value:.1f}".removesuffix(".0") + unit if value < 99.95 else f"{value:.0f}{unit}"
    return f"{count:.0f}"


def columns(widest: int, width: int) -> int:
    """Cells that stand side by side in `width` characters, whose labels have up to `widest`."""
    return max(1, (width + len(_GAP)) // (widest + _NUMBERS + sum(_LEAST) + len(_GAP)))


def rows(found: Sequence[Cell], width: int) -> int:
    """Lines that `grid` takes, the heading with them."""
    return 1 + -(-len(found) // columns(_widest(found), width)) if found else 0


def grid(found: Sequence[Cell], width: int, ascii_only: bool = False) -> list[Text]:
    """The cells as lines of at most `width` characters, under a heading; the bars take the room that there is."""
    if not found:
        return []
    widest = _widest(found)
    across = min(columns(widest, width), len(found))
    spare = (width - len(_GAP) * (across - 1)) // across - widest - _NUMBERS
    bars = _bars(spare)
    heading = Text(_GAP).join([_heading(found[0], widest, bars)] * across)
    lines = [heading]
    for start in range(0, len(found), across):
        lines.append(Text(_GAP).join(_drawn(cell, widest, bars, ascii_only) for cell in found[start : start + across]))
    return lines


def _widest(found: Sequence[Cell]) -> int:
    return max(4, *(len(cell.label) for cell in found))


def _bars(spare: int) -> tuple[int, int]:
    """Widths of the two bars."""
    memory = min(16, max(_LEAST[1], spare * 2 // 5))
    return min(24, max(_LEAST[0], spare - memory)), memory


def _heading(first: Cell, widest: int, bars: tuple[int, int]) -> Text:
    width = bars[1] + 7
    limit = f" of {size(first.limit)}B" if first.limit else ""
    memory = next((m for m in (f"memory{limit}", f"mem{limit}") if len(m) <= width), limit.strip())
    return Text(f"{'core':>{widest}} {'busy':<{bars[0] + 5}} {memory:<{width}}", style="dim")


def _drawn(cell: Cell, widest: int, bars: tuple[int, int], ascii_only: bool) -> Text:
    full = cell.used / cell.limit if cell.limit else 0.0
    drawn = Text(f"{cell.label:>{widest}} ")
    drawn.append_text(_bar(cell.busy, bars[0], "green", ascii_only))
    drawn.append(f" {cell.busy:>4.0%} ")
    drawn.append_text(_bar(full, bars[1], "red" if full > 0.9 else "yellow" if full > 0.75 else "cyan", ascii_only))
    return drawn.append(f" {size(cell.used):>6}")


def _bar(part: float, width: int, colour: str, ascii_only: bool) -> Text:
    """A bar; any activity shows as at least one mark."""
    filled = min(width, max(round(part * width), 1 if part > 0 else 0))
    marks = "#." if ascii_only else "█░"
    return Text(marks[0] * filled, style=colour).append(marks[1] * (width - filled), style="dim")
