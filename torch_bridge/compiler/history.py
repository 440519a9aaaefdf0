"""What was compiled in this process, and what Python read from tensors: enough to say later why a step compiled again.

A compilation costs a note here; a step that runs as before costs nothing.
"""

from __future__ import annotations

import itertools
import time
import weakref
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from torch_bridge import source
from torch_bridge.compiler import growth_hints
from torch_bridge.source import Source

if TYPE_CHECKING:
    from torch_bridge.compiler.program import Program
    from torch_bridge.compiler.program_spec import Execution
    from torch_bridge.compiler.trace import Trace

KEPT = 128
"""Compilations that are remembered. Each holds the list of ops, not the executable."""


class Read(NamedTuple):
    """A number that Python got from a tensor (`.item()`, `int()`, `bool()`), and the line that asked."""

    value: Any
    line: str


class Leaf(NamedTuple):
    """An array that a recording starts from, as one rank has it. origin: the op that made it on the host and the line that called it, or ''."""

    shape: tuple[int, ...]
    dtype: Any
    origin: str


@dataclass(eq=False)
class Compilation:
    """One structure for which a program was made. (It may still be found in a cache on disk.)

    number: counts from 1. step: marks of the script so far. nodes, sources: the recorded ops and where they were called; outs: the ids of its results.
    leaves: of every existing array: (local shape, dtype, origin), where the origin says which op made it on the host, if one did. labels: how leaves and
    results lie among the ranks, None for one rank. donate: leaves whose memory may be taken over. mode: the precision. numbers: the Python numbers by kind,
    with the slots they share. axes: of the mesh. reads: what Python had read from tensors lately. modes: of modules (`source.modes`).
    program: the `Program`, as long as it is kept.
    """

    number: int
    step: int
    when: float
    nodes: tuple[Any, ...]
    sources: tuple[Source, ...]
    outs: tuple[int, ...]
    leaves: tuple[Leaf, ...]
    labels: Any
    donate: tuple[bool, ...]
    mode: Any
    numbers: dict[type, Any]
    axes: dict[str, int]
    reads: tuple[Read, ...]
    modes: list[dict[str, bool]]
    program: weakref.ref[Any]

    def graph(self) -> Any:
        """The `torch.fx.Graph`, built anew."""
        from torch_bridge.ir import dtypes
        from torch_bridge.ir.graph import GraphBuilder
        from torch_bridge.ir.layout import contiguous_meta

        builder = GraphBuilder(self.nodes, self.sources, self.outs)
        used = {v: self.leaves[-v - 1] for v in builder.inputs}
        graph = builder.build({v: contiguous_meta(leaf.shape, dtypes.to_torch(leaf.dtype)) for v, leaf in used.items()})
        for (_, leaf), node in zip(used.items(), graph.nodes, strict=False):
            node.meta["origin"] = leaf.origin
        return graph

    @property
    def seconds(self) -> float:
        """What tracing, lowering and compiling took, 0 if that was never done or the program is gone."""
        program = self.program()
        return 0.0 if program is None else float(program.compile_seconds)


_numbers = itertools.count(1)


def _origin(holder: Any) -> str:
    storage = None if holder is None else holder()
    return "" if storage is None or storage.facts is None else str(storage.facts.origin)


class History:
    """Of one session. compilations: the last `KEPT`, oldest first. reads: the numbers that Python read last, newest last."""

    def __init__(self) -> None:
        self.compilations: deque[Compilation] = deque(maxlen=KEPT)
        self.reads: deque[Read] = deque(maxlen=32)

    def read(self, value: Any) -> Any:
        """Note a number that Python gets; gives it back."""
        if not (self.reads and self.reads[-1].value is value):
            self.reads.append(Read(value, source.short_line()))
        return value

    def compiling(self, program: Program, trace: Trace, run: Execution, every_shape: bool = True) -> None:
        """Note that a program was made for what a segment recorded. every_shape: it would be so for every shape, however often that comes."""
        from torch_bridge.compiler.program_spec import local_aval
        from torch_bridge.mesh import sharding, world
        from torch_bridge.telemetry import activity

        segment = run.segment
        avals = [local_aval(segment, i) for i in range(len(segment.leaves))]
        leaves = tuple(Leaf(tuple(a.shape), a.dtype, _origin(segment.holders.get(-i - 1))) for i, a in enumerate(avals))
        if every_shape:
            growth_hints.look(trace.nodes, trace.sources, tuple(leaf.shape for leaf in leaves))
        self.compilations.append(
            Compilation(
                number=next(_numbers),
                step=activity.ACTIVITY.steps,
                when=time.time(),
                nodes=trace.nodes,
                sources=trace.sources,
                outs=program.spec.results,
                leaves=leaves,
                labels=run.labels,
                donate=run.free,
                mode=run.mode,
                numbers=run.numbers,
                axes=dict(world.current().axes) if sharding.active() else {},
                reads=tuple(self.reads),
                modes=source.modes(),
                program=weakref.ref(program),
            )
        )
        self.reads.clear()
