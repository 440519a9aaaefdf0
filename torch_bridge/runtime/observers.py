"""Who is told of what a session does: one protocol for checks, hints, profiles and inspection."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from torch_bridge.compiler.program import Program
    from torch_bridge.compiler.trace import Trace
    from torch_bridge.ir.segment import Results, Segment

Phase = Literal["prepare", "compile", "dispatch", "wait"]
"""What the host does. prepare: from a recorded segment to a program and its arguments. compile: tracing by JAX and compilation by XLA, or loading from the
cache on disk. dispatch: handing a program to the devices. wait: for the devices, and copying results from them."""

QUIET: contextlib.AbstractContextManager[None] = contextlib.nullcontext()


class Observer:
    """Base class: told of nothing. Methods run on the thread that does the work; what they raise, the script gets."""

    reads_values = False
    """Whether it looks at the values of results: abstract runs, which have none, do not tell it."""

    programs_alone = False
    """Whether it asks for phases and the ends of steps alone: then programs may run without a segment (`replay.rerun`), of which only those tell."""

    def preparing(self, segment: Segment) -> None:
        """A segment is about to run; its graph may still be changed."""

    def phase(self, phase: Phase, program: Program | None) -> contextlib.AbstractContextManager[None]:
        """Around a phase. program: the one that is compiled or dispatched, None in other phases."""
        return QUIET

    def executed(self, trace: Trace, live: Results) -> None:
        """A program was handed to the devices, and its results to their storages, by value id."""

    def step_ended(self, ran: bool) -> None:
        """A step was marked. ran: whether anything had run since the last mark."""


def around(observers: Sequence[Observer], phase: Phase, program: Program | None = None) -> contextlib.AbstractContextManager[Any]:
    """All observers' contexts around a phase."""
    if not observers:
        return QUIET
    if len(observers) == 1:
        return observers[0].phase(phase, program)
    stack = contextlib.ExitStack()
    try:
        for observer in observers:
            stack.enter_context(observer.phase(phase, program))
    except BaseException:
        stack.close()
        raise
    return stack
