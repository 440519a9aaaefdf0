"""Gives the time of instructions in a trace to programs, and through their HLO to modules, source lines and aten ops."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from nxd_jax.inspect import nodes
from nxd_jax.inspect.profiling.instructions import CONTAINERS, Code, Instruction, parse
from nxd_jax.inspect.profiling.reading import Op
from nxd_jax.inspect.profiling.watching import Watched

logger = logging.getLogger("nxd_jax")

LEAST_KNOWN = 0.5
"""Part of the instructions seen in a trace that the HLO text of a program must have for the two to be one."""

Key = tuple[str, int | None]
"""What a trace calls a program: its HLO module, and the backend's number where there is one."""


@dataclass(frozen=True)
class Executable:
    """A program of the trace. name: 8 hex digits, the same for the same graph in every process (as `nxd-top` shows it), or the name of the HLO module of a
    program that did not come from recorded ops; source: 'file.py:line' of its last op; runs: dispatched or seen how often."""

    name: str
    source: str
    module: str
    runs: int
    compile_seconds: float = 0.0


class Attributed(NamedTuple):
    """What `attribute` found. executables: in the order in which they ran first; timed: each op; stale: names of programs whose code came from the compilation
    cache and calls modules and lines as they were when it was compiled."""

    executables: list[Executable]
    timed: list[Timed]
    stale: list[str]


class Timed(NamedTuple):
    """An op of the trace with its own seconds (without those of the instructions that it runs), what it is, and its executable's position."""

    op: Op
    seconds: float
    instruction: Instruction
    executable: int


def attribute(ops: Sequence[Op], watched: Sequence[Watched]) -> Attributed:
    """Each op with its program and instruction. watched: the programs that ran, in the order of their first dispatch. The seconds add up to the trace's: what
    cannot be given to a program goes to one with the name of its HLO module."""
    texts = [(w, code) for w in watched if (code := _code(w.program)) is not None]
    found = match(ops, [code for _, code in texts])
    runs: dict[Key, set[Any]] = defaultdict(set)
    for op in ops:
        runs[op.module, op.program].add(op.run)
    executables: list[Executable] = []
    places: dict[Key, int] = {}
    for key in runs:
        at = found.get(key)
        places[key] = len(executables)
        executables.append(_executable(key, len(runs[key]), None if at is None else texts[at][0]))
    nothing: dict[str, Instruction] = {}
    known = {key: texts[found[key]][1].instructions if key in found else nothing for key in runs}
    instructions = [known[op.module, op.program].get(op.name) or _unknown(op.name) for op in ops]
    seconds = own_seconds(ops, [i.container for i in instructions])
    timed = [Timed(op, s, i, places[op.module, op.program]) for op, s, i in zip(ops, seconds, instructions, strict=True)]
    stale = [executables[places[key]].name for key, at in found.items() if _stale(*texts[at])]
    return Attributed(executables, timed, sorted(set(stale)))


def _stale(watched: Watched, code: Code) -> bool:
    return nodes.of_another_run(watched.program.graph, (i.line for i in code.instructions.values()))


def _code(program: Any) -> Code | None:
    if program.compiled is None:
        return None
    try:
        return parse(program.compiled.as_text())
    except Exception as error:  # a backend that cannot show its code: its time is given to no module, and the table shows that
        logger.warning("no optimised HLO of a program, so its time is given to no module: %s: %s", type(error).__name__, error)
        return None


def _executable(key: Key, runs: int, watched: Watched | None) -> Executable:
    if watched is None:
        return Executable(key[0] or "(unknown)", "", key[0], runs)
    from torch_bridge.telemetry import activity

    graph = watched.program.facts or activity.describe(watched.program)
    return Executable(graph.name, graph.source, key[0], watched.runs, watched.compile_seconds)


def _unknown(name: str) -> Instruction:
    base = name.split(".")[0]
    return Instruction(base if base in CONTAINERS else "", op=f"({base})", phase="foreign")


def match(ops: Sequence[Op], codes: Sequence[Code]) -> dict[Key, int]:
    """Which of the HLO modules each program of the trace is: the one of that name with the most of its instructions. Alike ones (the same graph compiled for
    another shape) in the order in which they ran first."""
    seen: dict[Key, set[str]] = defaultdict(set)
    first: dict[Key, float] = {}
    for op in ops:
        key = op.module, op.program
        seen[key].add(op.name)
        first[key] = min(op.start, first.get(key, op.start))
    found: dict[Key, int] = {}
    for key in sorted(seen, key=first.__getitem__):
        known = [len(seen[key] & c.instructions.keys()) / len(seen[key]) if c.name == key[0] else 0.0 for c in codes]
        best = max(known, default=0.0)
        if best >= LEAST_KNOWN:
            alike = [at for at, part in enumerate(known) if part == best]
            found[key] = next((at for at in alike if at not in found.values()), alike[0])
    return found


# -- own time --------------------------------------------------------------------------------------


def own_seconds(ops: Sequence[Op], containers: Sequence[bool]) -> list[float]:
    """Seconds of each op; of those that run others, only what no other op of their device fills."""
    seconds = [op.end - op.start for op in ops]
    devices: dict[str, tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
    for at, op in enumerate(ops):
        devices[op.device][containers[at]].append(at)
    for leaves, outer in devices.values():
        if not outer:
            continue
        busy = merged([(ops[at].start, ops[at].end) for at in leaves])
        free = {at: seconds[at] - overlap(busy, ops[at].start, ops[at].end) for at in outer}
        own = dict(free)
        open_: list[int] = []
        for at in sorted(outer, key=lambda at: (ops[at].start, -ops[at].end)):
            while open_ and ops[open_[-1]].end < ops[at].end:
                open_.pop()
            if open_:
                own[open_[-1]] -= free[at]
            open_.append(at)
        for at, left in own.items():
            seconds[at] = max(left, 0.0)
    return seconds


def merged(spans: Sequence[tuple[float, float]]) -> np.ndarray:
    """The union of spans, as rows (start, end) in order that do not touch. Shape (n, 2)."""
    if not len(spans):
        return np.empty((0, 2))
    given = np.asarray(sorted(spans), dtype=float)
    ends = np.maximum.accumulate(given[:, 1])
    starts = np.flatnonzero(np.concatenate([[True], given[1:, 0] > ends[:-1]]))
    return np.stack([given[starts, 0], np.concatenate([ends[starts[1:] - 1], ends[-1:]])], axis=1)


def overlap(union: np.ndarray, start: float, end: float) -> float:
    """Seconds of a union (of `merged`) that lie between two moments."""
    if not len(union) or end <= start:
        return 0.0
    first, last = np.searchsorted(union[:, 1], start, "right"), np.searchsorted(union[:, 0], end, "left")
    inside = union[first:last]
    return float((np.minimum(inside[:, 1], end) - np.maximum(inside[:, 0], start)).sum()) if len(inside) else 0.0
