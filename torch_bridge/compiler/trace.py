"""A recorded structure, with the programs that were made for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch_bridge.compiler.program import Program
from torch_bridge.compiler.program_spec import Execution
from torch_bridge.config.settings import SETTINGS
from torch_bridge.mesh.places import HERE, Place
from torch_bridge.passes import cut_segment, place_nodes
from torch_bridge.passes.cut_segment import Part
from torch_bridge.passes.verify import parts as verify_parts
from torch_bridge.source import Source


class Trace:
    """A structure that was recorded.

    Attributes:
        nodes: its nodes.
        sources: where each came from.
        parts: how it is cut into programs, by the values that are needed, the places of its nodes if somebody chose them, and those of its leaves.
        programs: those of each part; they differ in what they take over, in labels, precision or in which numbers they share.
        following: the trace that ran after it last time.
        used: when it ran last, on the session's clock.
        evicted: it is no longer kept.
        forecast: what its next run is expected to take (`runtime.speculation`).
        agreed: lists of nodes that are known to be its own from a place on.
    """

    def __init__(self, nodes: tuple[Any, ...], sources: Sequence[Source]):
        self.nodes = nodes
        self.sources = tuple(sources)
        self.parts: dict[Any, tuple[Part, ...]] = {}
        self.programs: dict[Part, list[Program]] = {}
        self.following: Trace | None = None
        self.used = 0
        self.evicted = False
        self.forecast: Any = None
        self.agreed: dict[int, list[Any]] = {}

    def cut(
        self,
        outs: tuple[int, ...],
        chosen: tuple[Place, ...] = (),
        leaves: tuple[Place | None, ...] = (),
        home: Place = HERE,
        first: tuple[int, ...] | None = None,
    ) -> tuple[Part, ...]:
        """The parts that compute these values, in order.

        chosen: where each node runs; leaves: the places at which these lie, from which it follows otherwise. Without either all is one part, or two if `first`,
        values that are needed at once, leaves some for later. home: where nodes run whose inputs lie at none of the places.
        """
        parts = self.parts.get((outs, chosen, leaves, first, home))
        if parts is None:
            places = chosen or (place_nodes.place(self.nodes, leaves, outs, home) if leaves or home is not HERE else ())
            if first is not None and not places:
                places = [HERE] * len(self.nodes)
            parts = cut_segment.cut(self.nodes, outs, places, first) if places else (Part(outs),)
            if SETTINGS.verify:
                verify_parts.check(parts, self.nodes, outs)
            self.parts[outs, chosen, leaves, first, home] = parts
        return parts

    def find(self, part: Part, run: Execution) -> Program | None:
        """A program of a part for this execution: one that takes over just what is free, or more too (that is copied for it)."""
        programs = self.programs.get(part, ())
        if len(programs) == 1:
            return programs[0] if programs[0].spec.accepts(run) else None
        just = next((program for program in programs if program.spec.takes_just(run) and program.spec.accepts(run)), None)
        return just or next((program for program in programs if program.spec.accepts(run)), None)
