"""Reads the trace that JAX's profiler wrote (`*.xplane.pb`, through `jax.profiler.ProfileData`): what the devices ran, and our own annotations.

The instructions of a program are events with the name of an HLO instruction (`hlo_op`), of its module (`hlo_module`) and, where the backend gives them,
numbers of the program and of its run. A CPU has them on threads of the host, an accelerator on a plane of its own.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from nxd_jax.inspect.profiling.watching import PREFIX

logger = logging.getLogger("nxd_jax")

LIMIT = 60.0
"""Seconds after which reading a trace stops, by default."""
_LOOK_EVERY = 20_000

_DEVICE = re.compile(r"/device:(\w+):(\d+)$")
_DERIVED = re.compile(r"XLA Modules|Steps|Framework|Source|XLA TraceMe|Async XLA Ops|Launch Stats")
"""Lines of an accelerator that repeat what others hold, under other names."""


class Op(NamedTuple):
    """One run of one HLO instruction on a device. device: as `platform:number`; start, end: seconds since the trace began; program, run: the backend's numbers,
    None where it gives none; module: of HLO; name: of the instruction."""

    device: str
    start: float
    end: float
    program: int | None
    run: int | None
    module: str
    name: str


class Mark(NamedTuple):
    """One of our annotations: its name without the prefix, its thread (a number within the trace), start and end in seconds since the trace began."""

    name: str
    thread: int
    start: float
    end: float


@dataclass
class Trace:
    """What was read. threads: names by number; cut: what was left out, in words ('' if nothing was); events: how many were looked at."""

    ops: list[Op] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    threads: dict[int, str] = field(default_factory=dict)
    cut: str = ""
    events: int = 0


def read(path: str | os.PathLike[str], limit: float | None = LIMIT) -> Trace:
    """Read a trace file. limit: seconds after which the rest is left out, and `cut` says so; None: never."""
    from jax.profiler import ProfileData

    return collect(ProfileData.from_file(os.fspath(path)), limit)


def collect(data: Any, limit: float | None = LIMIT, platform: str = "") -> Trace:
    """The same from a `jax.profiler.ProfileData`. platform: of devices without a plane of their own; default JAX's."""
    if not platform:
        import jax

        platform = jax.default_backend()
    planes = list(data.planes)
    accelerators = [(p, m) for p in planes if (m := _DEVICE.match(p.name)) and m[1] != "CUSTOM"]
    trace, started = Trace(), time.monotonic()
    thread = 0
    for plane in sorted(planes, key=lambda p: bool(_DEVICE.match(p.name))):  # our annotations first: without them nothing can be said
        if not plane.name.startswith("/host:") or plane.name == "/host:metadata":
            continue
        for line in sorted(plane.lines, key=lambda line: not line.name.startswith("python")):
            thread += 1
            trace.threads[thread] = line.name
            for event in _bounded(line.events, trace, started, limit):
                _host_event(trace, event, thread, "" if accelerators else platform)
    for plane, matched in accelerators:
        device = f"{matched[1].lower()}:{matched[2]}"
        for line in _op_lines(list(plane.lines)):
            for event in _bounded(line.events, trace, started, limit):
                _device_event(trace, event, device)
    if trace.cut:
        logger.warning("%s", trace.cut)
    return trace


def _bounded(events: Iterable[Any], trace: Trace, started: float, limit: float | None) -> Iterator[Any]:
    """The events until the time is over."""
    for event in events:
        if trace.events % _LOOK_EVERY == 0 and limit is not None and time.monotonic() - started > limit:
            trace.cut = (
                f"reading the trace stopped after {limit:g} s and {trace.events} events, so the tables leave out what came later; the files are complete. "
                "Profile fewer steps (steps=), or pass limit=None"
            )
        if trace.cut:
            return
        trace.events += 1
        yield event


def _host_event(trace: Trace, event: Any, thread: int, platform: str) -> None:
    name, start = event.name, event.start_ns * 1e-9
    if name.startswith(PREFIX):
        trace.marks.append(Mark(name.removeprefix(PREFIX), thread, start, start + event.duration_ns * 1e-9))
    elif platform and event.duration_ns > 0 and not name.startswith("end: "):
        found = dict(event.stats)
        if "hlo_op" in found:
            trace.ops.append(_op(event, found, f"{platform}:{found.get('device_ordinal', 0)}"))


def _device_event(trace: Trace, event: Any, device: str) -> None:
    found = dict(event.stats)
    if "hlo_op" in found or "hlo_module" in found:
        trace.ops.append(_op(event, found, device))


def _op(event: Any, found: dict[str, Any], device: str) -> Op:
    start = event.start_ns * 1e-9
    module = str(found.get("hlo_module", ""))
    return Op(
        device,
        start,
        start + event.duration_ns * 1e-9,
        found.get("program_id"),
        found.get("run_id"),
        module.partition("(")[0],
        str(found.get("hlo_op") or event.name),
    )


def _op_lines(lines: list[Any]) -> list[Any]:
    """The lines of an accelerator that hold each instruction once."""
    named = [line for line in lines if line.name == "XLA Ops"]
    return named or [line for line in lines if not _DERIVED.match(line.name)]
