"""From a trace and the programs that ran to the tables and spans of a `Profile`."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from nxd_jax.inspect.profiling import results
from nxd_jax.inspect.profiling.attribution import Executable, Timed, attribute, merged, overlap
from nxd_jax.inspect.profiling.hosting import Hosting, hosting
from nxd_jax.inspect.profiling.reading import Op, Trace
from nxd_jax.inspect.profiling.results import (
    COMPILER,
    FOREIGN,
    OUTSIDE,
    DeviceRow,
    DeviceSpan,
    ExecutableRow,
    HostRow,
    HostSpan,
    InstructionRow,
    ModuleRow,
    OpRow,
    Profile,
    StepRow,
)
from nxd_jax.inspect.profiling.watching import OWN_MODULE, PHASES, Watched
from nxd_jax.inspect.tables import Table

SPANS = 16_000
"""Spans that the timeline keeps of all devices together, and of the host; of more, those near one another become one."""


def summarize(trace: Trace, watched: Sequence[Watched], first_step: int = 0) -> Profile:
    """The tables of a trace. watched: the programs that ran meanwhile; first_step: steps that went before it."""
    ended = max((op.end for op in trace.ops), default=0.0)
    host = hosting(trace.marks, ended)
    ops = [op for op in trace.ops if op.end > host.start and op.start < host.end and op.module != OWN_MODULE]
    executables, timed, stale = attribute(ops, watched)
    busy = _busy(ops)
    whole = float(sum(t.seconds for t in timed))
    return Profile(
        done=True,
        seconds=host.end - host.start,
        device_seconds=whole,
        steps=_steps(host, busy, first_step),
        host=_host(host, trace.threads),
        devices=_devices(timed, busy, host),
        executables=_executables(executables, timed, whole),
        modules=_modules(timed, whole),
        ops=_ops(timed, whole),
        instructions=_instructions(executables, timed, whole),
        notes=_notes(trace, host, timed, watched, stale),
        host_spans=_host_spans(host, trace.threads),
        device_spans=_device_spans(timed, host),
    )


def _busy(ops: Sequence[Op]) -> dict[str, np.ndarray]:
    """When each device ran something."""
    spans: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for op in ops:
        spans[op.device].append((op.start, op.end))
    return {device: merged(spans[device]) for device in sorted(spans, key=_number)}


def _number(device: str) -> tuple[str, int]:
    platform, _, number = device.partition(":")
    return platform, int(number or 0)


def _name(threads: dict[int, str], host: Hosting, thread: int) -> str:
    return "main" if thread == host.thread else f"{threads.get(thread, 'thread')} ({thread})"


# -- tables ----------------------------------------------------------------------------------------


def _steps(host: Hosting, busy: dict[str, np.ndarray], first: int) -> Table[StepRow]:
    rows = []
    mine = [s for s in host.stretches if s.thread == host.thread]
    for k, (start, end) in enumerate(zip([host.start, *host.steps], host.steps, strict=False)):
        spent = dict.fromkeys(PHASES, 0.0)
        for s in mine:
            spent[s.phase] += max(0.0, min(s.end, end) - max(s.start, start))
        device = sum(overlap(union, start, end) for union in busy.values()) / max(len(busy), 1)
        rows.append(StepRow(first + k + 1, start - host.start, end - start, **spent, busy=device))
    return Table("Steps", rows, results.STEP_COLUMNS, most=20)


def _host(host: Hosting, threads: dict[int, str]) -> Table[HostRow]:
    spent: Counter[tuple[int, str]] = Counter()
    count: Counter[tuple[int, str]] = Counter()
    for s in host.stretches:
        spent[s.thread, s.phase] += s.end - s.start  # type: ignore[assignment]
        count[s.thread, s.phase] += 1
    whole = host.end - host.start
    keys = sorted(spent, key=lambda k: (k[0] != host.thread, k[0], PHASES.index(k[1])))
    rows = [HostRow(_name(threads, host, t), p, float(spent[t, p]), spent[t, p] / whole if whole else 0.0, count[t, p]) for t, p in keys]
    note = "record: the script's Python and recording ops; prepare: finding the program and its arguments"
    return Table("Host time", rows, results.HOST_COLUMNS, note)


def _devices(timed: Sequence[Timed], busy: dict[str, np.ndarray], host: Hosting) -> Table[DeviceRow]:
    seconds: Counter[str] = Counter()
    count = Counter(t.op.device for t in timed)
    for t in timed:
        seconds[t.op.device] += t.seconds  # type: ignore[assignment]
    rows = []
    for device, union in busy.items():
        taken = overlap(union, host.start, host.end)
        rows.append(DeviceRow(device, taken, float(seconds[device]), _part(taken, host.end - host.start), count[device]))
    note = "a CPU runs several instructions of one device at a time, so that their times can add up to more than it was busy"
    return Table("Devices", rows, results.DEVICE_COLUMNS, note if any(r.device.startswith("cpu") for r in rows) else "", most=16)


def _sums(timed: Sequence[Timed], key: Callable[[Timed], Any]) -> list[tuple[Any, float, int]]:
    """(key, seconds, count), the most seconds first."""
    seconds: dict[Any, float] = defaultdict(float)
    count: Counter[Any] = Counter()
    for t in timed:
        k = key(t)
        seconds[k] += t.seconds
        count[k] += 1
    return sorted(((k, s, count[k]) for k, s in seconds.items()), key=lambda found: -found[1])


def _executables(executables: Sequence[Executable], timed: Sequence[Timed], whole: float) -> Table[ExecutableRow]:
    rows = [
        ExecutableRow(e.name, e.source, e.runs, seconds, _part(seconds, whole), e.compile_seconds, count)
        for at, seconds, count in _sums(timed, lambda t: t.executable)
        for e in [executables[at]]
    ]
    return Table("Programs", rows, results.EXECUTABLE_COLUMNS, most=12)


def _part(seconds: float, whole: float) -> float:
    return seconds / whole if whole else 0.0


def module_of(timed: Timed) -> str:
    """What the tables call the module of an op."""
    i = timed.instruction
    return {"compiler": COMPILER, "foreign": FOREIGN}.get(i.phase) or i.module or OUTSIDE


def _modules(timed: Sequence[Timed], whole: float) -> Table[ModuleRow]:
    rows = []
    for (module, phase), seconds, _ in _sums(timed, lambda t: (module_of(t), t.instruction.phase)):
        forward, backward = seconds * (phase == "forward"), seconds * (phase == "backward")
        rows.append(ModuleRow(module, forward, backward, seconds - forward - backward, seconds, 0.0))
    return results.module_table(rows, whole)


def _ops(timed: Sequence[Timed], whole: float) -> Table[OpRow]:
    rows = [OpRow(op, seconds, _part(seconds, whole), count) for op, seconds, count in _sums(timed, lambda t: t.instruction.op)]
    several = len({t.op.device for t in timed}) > 1
    return Table(
        "Device time by op", rows, results.OP_COLUMNS, "collectives include waiting for the other devices" if several else "", most=15
    )


def _instructions(executables: Sequence[Executable], timed: Sequence[Timed], whole: float) -> Table[InstructionRow]:
    rows = []
    for (at, name, i), seconds, count in _sums(timed, lambda t: (t.executable, t.op.name, t.instruction)):
        rows.append(
            InstructionRow(
                name,
                i.opcode,
                executables[at].name,
                i.module,
                i.line,
                i.op,
                i.phase,
                seconds,
                _part(seconds, whole),
                count,
                seconds / count,
            )
        )
    return Table("Slowest instructions", rows, results.INSTRUCTION_COLUMNS, most=12)


def _notes(trace: Trace, host: Hosting, timed: Sequence[Timed], watched: Sequence[Watched], stale: Sequence[str]) -> tuple[str, ...]:
    notes = [trace.cut] if trace.cut else []
    if not timed:
        from torch_bridge.mesh import abstract_arrays

        if abstract_arrays.active():
            why = "this is an abstract run, which executes nothing"
        elif watched:
            why = "programs were dispatched, but the trace has no instruction of theirs: this backend does not report them"
        else:
            why = "nothing ran on the device: end a step (torch_xla.sync() or xm.mark_step()) inside the block"
        notes.append(why)
    elif not host.steps:
        notes.append("no step ended in the block (torch_xla.sync() and xm.mark_step() end one), so there are no step times")
    if stale:
        notes.append(
            f"{', '.join(stale)}: compiled by an earlier run and found in the compilation cache, with the module names and source lines of that run; "
            "with an empty cache folder (JAX_COMPILATION_CACHE_DIR, NEURON_COMPILE_CACHE_URL) they are those of this one"
        )
    return tuple(notes)


# -- the timeline ----------------------------------------------------------------------------------


def _host_spans(host: Hosting, threads: dict[int, str]) -> tuple[HostSpan, ...]:
    """The stretches, those shorter than a pixel of a wide picture left to their neighbours."""
    spans: list[HostSpan] = []
    least = (host.end - host.start) / SPANS
    for s in sorted(host.stretches, key=lambda s: (s.thread != host.thread, s.thread, s.start)):
        name, start, end = _name(threads, host, s.thread), s.start - host.start, s.end - host.start
        last = spans[-1] if spans and spans[-1].thread == name else None
        near = last is not None and start - last.end <= least
        if last is not None and near and (last.phase == s.phase or end - start < least):
            spans[-1] = HostSpan(name, last.phase, last.start, end)
        else:
            spans.append(HostSpan(name, s.phase, start, end))
    return tuple(spans)


def _device_spans(timed: Sequence[Timed], host: Hosting) -> tuple[DeviceSpan, ...]:
    devices: dict[str, list[Timed]] = defaultdict(list)
    for t in timed:
        if not t.instruction.container:
            devices[t.op.device].append(t)
    most = SPANS // max(len(devices), 1)
    found: list[DeviceSpan] = []
    for device in sorted(devices, key=_number):
        each = sorted(devices[device], key=lambda t: t.op.start)
        found += _merged_spans(device, each, host, most) if len(each) > most else [_span(t, host.start) for t in each]
    return tuple(found)


def _span(t: Timed, zero: float) -> DeviceSpan:
    return DeviceSpan(t.op.device, module_of(t), t.instruction.phase, t.op.start - zero, t.op.end - zero)


def _merged_spans(device: str, timed: Sequence[Timed], host: Hosting, most: int) -> list[DeviceSpan]:
    """At most so many spans: each slice of the time shows what took most of it, for as long as the device was busy."""
    width = (host.end - host.start) / most
    slices: list[dict[tuple[str, str], float]] = [{} for _ in range(most)]
    for t in timed:
        key = module_of(t), t.instruction.phase
        start, end = max(t.op.start - host.start, 0.0), min(t.op.end, host.end) - host.start
        for at in range(int(start / width), min(int(end / width), most - 1) + 1):
            inside = min(end, (at + 1) * width) - max(start, at * width)
            slices[at][key] = slices[at].get(key, 0.0) + max(inside, 0.0)
    found: list[DeviceSpan] = []
    for at, spent in enumerate(slices):
        if not spent:
            continue
        module, phase = max(spent, key=spent.__getitem__)
        start, end = at * width, at * width + min(sum(spent.values()), width)
        last = found[-1] if found else None
        if last is not None and (last.module, last.phase) == (module, phase) and start - last.end < width / 100:
            found[-1] = DeviceSpan(device, module, phase, last.start, end)
        else:
            found.append(DeviceSpan(device, module, phase, start, end))
    return found
