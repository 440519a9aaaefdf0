"""What the host did when, from our annotations: phases that do not overlap, by thread, and the steps."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from nxd_jax.inspect.profiling.reading import Mark
from nxd_jax.inspect.profiling.watching import BEGIN, END, PHASES, STEP


class Stretch(NamedTuple):
    """A phase of a thread, in seconds since the trace began; others inside it are cut out."""

    thread: int
    phase: str
    start: float
    end: float


class Hosting(NamedTuple):
    """The host's part. start, end: of the recording; thread: the one that marks steps, else the one that began it; stretches: in order; steps: their ends."""

    start: float
    end: float
    thread: int
    stretches: list[Stretch]
    steps: list[float]


def hosting(marks: Sequence[Mark], last: float = 0.0) -> Hosting:
    """Read the annotations. last: the end of the trace, where the recording has no end."""
    begin = next((m for m in marks if m.name == BEGIN), None)
    end = next((m for m in marks if m.name == END), None)
    start = begin.start if begin else min((m.start for m in marks), default=0.0)
    stop = end.start if end else max([last, *(m.end for m in marks)])
    stepping = Counter(m.thread for m in marks if m.name == STEP).most_common(1)
    thread = stepping[0][0] if stepping else begin.thread if begin else 0
    threads: dict[int, list[Mark]] = defaultdict(list)
    for mark in marks:
        if mark.name in PHASES:
            threads[mark.thread].append(mark)
    stretches = [s for each in threads.values() for s in flattened(each)]
    stretches += gaps([s for s in stretches if s.thread == thread], thread, start, stop)
    stretches.sort(key=lambda s: s.start)
    return Hosting(start, stop, thread, stretches, sorted(m.start for m in marks if m.name == STEP))


def flattened(marks: Iterable[Mark]) -> list[Stretch]:
    """Spans of one thread, each in its place or inside another, as stretches that do not overlap: the innermost counts."""
    found: list[Stretch] = []
    open_: list[Mark] = []
    at = 0.0
    for mark in sorted(marks, key=lambda m: (m.start, -m.end)):
        while open_ and open_[-1].end <= mark.start:
            top = open_.pop()
            found.append(Stretch(top.thread, top.name, at, top.end))
            at = top.end
        if open_:
            found.append(Stretch(open_[-1].thread, open_[-1].name, at, mark.start))
        at = mark.start
        open_.append(mark)
    while open_:
        top = open_.pop()
        found.append(Stretch(top.thread, top.name, at, top.end))
        at = top.end
    return [s for s in found if s.end > s.start]


def gaps(stretches: Iterable[Stretch], thread: int, start: float, end: float) -> list[Stretch]:
    """What is between a thread's stretches: it records."""
    found, at = [], start
    for each in sorted(stretches, key=lambda s: s.start):
        if each.start > at:
            found.append(Stretch(thread, "record", at, min(each.start, end)))
        at = max(at, each.end)
    if end > at:
        found.append(Stretch(thread, "record", at, end))
    return found
