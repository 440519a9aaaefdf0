"""What one core does in a training step, as numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from nxd_jax.inspect.collectives import Collective
from nxd_jax.inspect.costs import Costs


@dataclass(frozen=True)
class Phase:
    """A part of a step in which the engines of a core and its memory can work at the same time, on one core in one step.

    name: phases with equal names are shown as one. flops: multiplications and additions of matrix products. elements: elements that elementwise operations and
    reductions read, an operation at a time. bytes: to and from HBM. dtype: of the matrix products, as `Topology.peak_flops_per_core` takes it.
    """

    name: str
    flops: float = 0.0
    elements: float = 0.0
    bytes: float = 0.0
    dtype: str = "bfloat16"


@dataclass(frozen=True)
class Work:
    """What one core does in a step. All numbers are for one step and the core that does most.

    name: of the model and layout. axes: of the mesh and their sizes, outermost first; its ranks fill it in row-major order. phases, collectives: of the
    micro-batches, all of them together. update, reductions: the same of what happens once after them (optimizer, gradients). stages, microbatches: of the
    pipeline. sequences, tokens: in the global batch; 0 if not known. schedule_bubble: part of the micro-batches' time that a stage waits besides; None: that
    of 1F1B, (stages - 1) / microbatches.
    """

    name: str
    axes: Mapping[str, int]
    phases: tuple[Phase, ...]
    collectives: tuple[Collective, ...] = ()
    update: tuple[Phase, ...] = ()
    reductions: tuple[Collective, ...] = ()
    stages: int = 1
    microbatches: int = 1
    sequences: int = 0
    tokens: int = 0
    schedule_bubble: float | None = None

    def __post_init__(self) -> None:
        if self.stages < 1 or self.microbatches < 1:
            raise ValueError(f"Work: stages={self.stages} and microbatches={self.microbatches} must both be at least 1")

    @property
    def cores(self) -> int:
        """Of the whole mesh."""
        return math.prod(self.axes.values())

    @property
    def flops(self) -> dict[str, float]:
        """Multiplications and additions of one core by dtype."""
        found: dict[str, float] = {}
        for p in (*self.phases, *self.update):
            if p.flops:
                found[p.dtype] = found.get(p.dtype, 0.0) + p.flops
        return found

    @property
    def hbm_bytes(self) -> float:
        """Bytes to and from the memory of one core."""
        return sum(p.bytes for p in (*self.phases, *self.update))

    @property
    def bubble(self) -> float:
        """Part of the micro-batches' time that a stage waits besides."""
        return (self.stages - 1) / self.microbatches if self.schedule_bubble is None else self.schedule_bubble


def program_work(
    costs: Costs, collectives: Iterable[Collective], axes: Mapping[str, int], *, dtype: str = "bfloat16", name: str = "", sequences: int = 0
) -> Work:
    """The work of a recorded program: one phase for each of its ops.

    costs: `nxd_jax.inspect.costs.costs` of its jaxpr. collectives: of one run. axes: of the mesh, outermost first. dtype: of matrix products.

    The bytes of `costs` count every op as if none were fused, so the time is an upper bound where memory is the limit.
    """
    phases = tuple(Phase(r.phase or "program", r.flops, r.other, r.bytes, dtype) for r in costs.rows)
    return Work(name, dict(axes), phases, tuple(collectives), sequences=sequences)
