"""Programs of shapes that may not come again run in eager torch first: a text that grows by one token, batches padded to their longest sentence.

A compilation takes seconds, eager torch milliseconds. Where the same ops, from the same lines, have been compiled for `SHAPES` shapes (or other constants, or
another number of times each: episodes of other lengths), a further program is cold: it runs in eager torch (`eager_programs`), and is compiled when it comes
again after `USES` times. So is one between whose first and last line the last `STREAK` programs ran once each (a detector's loss, whose ops depend on the boxes
of a batch). Which way a step goes depends on what came
before it in the process, and never on time. Only for programs on one CPU device.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import torch

from torch_bridge.config import environment
from torch_bridge.config.settings import SETTINGS
from torch_bridge.precision import precision_mode
from torch_bridge.source import script_line

if TYPE_CHECKING:
    from torch_bridge.compiler.program import Program
    from torch_bridge.compiler.program_spec import ProgramSpec
    from torch_bridge.compiler.trace import Trace

logger = logging.getLogger("torch_bridge")

SHAPES = 3
"""Programs of the same ops that are compiled before further ones are cold."""
STREAK = 12
"""Programs in a row between two lines that ran once each, before a further one there is cold, whatever its ops."""
USES = 2
"""Times that a cold program runs before it is compiled."""
KEPT = 64
"""Structures of cold programs that are kept: a graph takes about a kilobyte for each op."""
LEAST = 16
"""Ops that a program has at least: small ones compile fast."""


class ColdShapes:
    """Of one session: how many programs were compiled of the same ops, and the last ones between two lines, by hash."""

    def __init__(self) -> None:
        self._compiled: Counter[int] = Counter()
        self._said = False
        self._last: defaultdict[int, deque[weakref.ref[Program]]] = defaultdict(lambda: deque(maxlen=STREAK))

    def look(self, program: Program, trace: Trace) -> bool:
        """Have a new program run in eager torch first, if enough like it were compiled; whether it will. Counts those that are."""
        if len(trace.nodes) < LEAST or not possible(program.spec):
            return False
        lines = [(source.file, source.line) for source in trace.sources]
        structure = hash(frozenset((node[0].op, line) for node, line in zip(trace.nodes, lines, strict=False)))
        streak = self._is_streak(hash((lines[0], lines[-1])) if lines else 0, program)
        known = self._compiled[structure]
        if known < SHAPES and not streak:
            self._compiled[structure] += 1
            return False
        if known < SHAPES:
            self._say(f"the last {STREAK} programs there ran once each", new=not self._said)
            self._said = True
        else:
            self._say(
                f"the same ops ({len(trace.nodes)} of them now) have been compiled for {SHAPES} shapes or lengths", new=known == SHAPES
            )
            self._compiled[structure] = SHAPES + 1
        program.cold = functools.partial(_computing[0], program.spec)
        return True

    def _say(self, why: str, new: bool) -> None:
        if new:
            logger.info(
                "%s: %s: new ones run in eager torch on the CPU %d times before they are compiled (NXD_JAX_COLD_SHAPES=0 compiles each at once)",
                script_line() or "a loop",
                why,
                USES,
            )

    def _is_streak(self, place: int, program: Program) -> bool:
        """Whether the last programs between two lines were as many as make a streak, and none of them ran again. Notes this one."""
        last = self._last[place]
        before = [ref() for ref in last]
        last.append(weakref.ref(program))
        return len(before) == STREAK and all(p is None or p.executions <= 1 for p in before)


def too_many(traces: Iterable[Trace]) -> list[Trace]:
    """Those structures with cold programs that have not run for longest and are more than are kept."""
    cold = [t for t in traces if any(p.cold is not None and not p.has_executable for programs in t.programs.values() for p in programs)]
    return sorted(cold, key=lambda t: t.used)[: max(0, len(cold) - KEPT)]


Compute = Callable[["ProgramSpec", Sequence[Any]], list[Any]]
_computing: list[Compute] = []


def compute_with(compute: Compute) -> None:
    """Say what computes a program in eager torch (`eager_programs`)."""
    _computing[:] = [compute]


def possible(spec: ProgramSpec) -> bool:
    """Whether eager torch may compute a program: the environment allows it, and the arrays are in one CPU device's memory."""
    return (
        SETTINGS.cold_shapes
        and bool(_computing)
        and not (SETTINGS.verify or SETTINGS.extract_only)
        and spec.labels is None
        and spec.mode == precision_mode.PLAIN
        and jax.default_backend() == "cpu"
        and jax.process_count() == 1
        and not environment.dumping()
    )


def is_ready(program: Program) -> bool:
    """Whether a program can run now: it is compiled, or cold, and torch's ops are torch's own (in `torch.func` they are not)."""
    if program.cold is None or program.has_executable:
        return program.begun
    return program.executions < USES and torch._C._functorch.peek_interpreter_stack() is None
