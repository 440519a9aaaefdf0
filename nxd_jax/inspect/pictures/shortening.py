"""A profile as it is drawn: long compilations are given little room, so that the steps beside them can still be seen."""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from nxd_jax.inspect.profiling.attribution import merged

if TYPE_CHECKING:
    from nxd_jax.inspect.profiling.results import Profile

LONG = 0.2
"""A compilation is drawn shorter if it takes more than this part of everything that is none."""

ROOM = 0.06
"""What it is drawn as, of the same."""


@dataclasses.dataclass(frozen=True)
class Cut:
    """A stretch that is drawn shorter. start, end: as drawn, in seconds; seconds: what it took."""

    start: float
    end: float
    seconds: float


def shortened(profile: Profile) -> tuple[Profile, list[Cut]]:
    """The profile with times as they are drawn, and what was drawn shorter: the profile itself and nothing if no compilation is long."""
    compiling = merged([(s.start, min(s.end, profile.seconds)) for s in profile.host_spans if s.phase == "compile"]).tolist()
    rest = profile.seconds - sum(end - start for start, end in compiling)
    long = [(start, end) for start, end in compiling if end - start > LONG * rest]
    if not long or rest <= 0:
        return profile, []
    at = _map(long, ROOM * rest)
    cuts = [Cut(at(start), at(end), end - start) for start, end in long]
    steps = profile.steps._with(
        [dataclasses.replace(r, start=at(r.start), seconds=at(r.start + r.seconds) - at(r.start)) for r in profile.steps]
    )
    return dataclasses.replace(
        profile,
        seconds=at(profile.seconds),
        steps=steps,
        host_spans=tuple(dataclasses.replace(s, start=at(s.start), end=at(s.end)) for s in profile.host_spans),
        device_spans=tuple(dataclasses.replace(s, start=at(s.start), end=at(s.end)) for s in profile.device_spans),
    ), cuts


def _map(long: Sequence[tuple[float, float]], room: float) -> Callable[[float], float]:
    """From time to drawn time: each stretch becomes `room`, and what follows moves up."""
    starts = [start for start, _ in long]
    saved = [0.0]
    for start, end in long:
        saved.append(saved[-1] + (end - start) - room)

    def at(time: float) -> float:
        k = bisect.bisect_right(starts, time)
        if k and time < long[k - 1][1]:
            start, end = long[k - 1]
            return start - saved[k - 1] + (time - start) / (end - start) * room
        return time - saved[k]

    return at
