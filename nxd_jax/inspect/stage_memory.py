"""The memory of a core of each pipeline rank in a training step: what stays, activations of the micro-batches on their way, and temporaries."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nxd_jax.inspect import units
from nxd_jax.inspect.memory import Memory
from nxd_jax.inspect.owners import KINDS, Owner
from nxd_jax.inspect.stages import NAMES, Piece, spans
from nxd_jax.inspect.tables import Column, Table
from nxd_jax.pipeline.schedules import Kind
from nxd_jax.pipeline.step_log import StepLog, Task
from torch_bridge.mesh.abstract_arrays import AbstractArray
from torch_bridge.mesh.sharding import alone
from torch_bridge.recorder import placed
from torch_bridge.recorder.tensor import XLATensor
from torch_bridge.runtime import abstract

STAYS = ("parameter", "buffer", "master weight", "optimizer state")
"""Kinds that live from step to step."""

Owned = Mapping[int, tuple[Owner, XLATensor]]


@dataclass(frozen=True)
class RankMemory(Memory):
    """A core of a pipeline rank at the moment of a step when it needs most memory.

    arguments: all that it holds then. results, in_place, temporaries: of the program that runs then, by XLA's plan. activations: what is held of micro-batches
    whose backward pass is still to come, with what is on its way between stages. gradients: of its parameters.

    rank: along pp. stages: those that it has. stays: bytes by kind (`STAYS`). task: of that program.
    """

    rank: int = 0
    stages: tuple[int, ...] = ()
    stays: Mapping[str, int] = field(default_factory=dict)
    task: str = ""

    def kinds(self) -> dict[str, int]:
        """The peak by kind. Adds up to `peak`; what the program gives besides is among the activations."""
        found = {**dict.fromkeys(KINDS, 0), **self.stays, "activations": 0, "temporaries": self.temporaries}
        found["gradient"] = self.gradients
        found["activations"] = self.peak - self.temporaries - self.gradients - sum(self.stays.values())
        return {kind: n for kind, n in found.items() if n}


def of_ranks(
    log: StepLog, found: Sequence[Piece], known: Owned, run: abstract.Run | None, hbm_bytes: int, core: str
) -> tuple[RankMemory, ...]:
    """The memory of every rank. known: whose tensors are (`owners.owned`). run: the abstract run, in which all arrays were counted; None: they follow from
    the schedule."""
    assert log.schedule is not None
    made = []
    for rank in range(log.schedule.ranks):
        own = [piece for piece in found if piece.rank == rank]
        mesh = next(
            (home.mesh for home, at in zip(log.homes, log.schedule.placement, strict=True) if at == rank and home is not None), None
        )
        stays, gradients = _kept({key: of for key, of in known.items() if _is_abstract(of[1]) == (run is not None)}, mesh, _taken(found))
        kept = sum(stays.values())
        moments = list(_counted(own, run) if run is not None else _planned(log, rank, own, kept, gradients))
        held, with_gradients, piece = max(moments, key=lambda m: m[0] + _peak(m[2]), default=(kept, False, None))
        plan = None if piece is None else piece.inspection.memory
        made.append(
            RankMemory(
                arguments=held,
                results=0 if plan is None else plan.results,
                in_place=0 if plan is None else plan.in_place,
                temporaries=0 if plan is None else plan.temporaries,
                held=() if plan is None else plan.held,
                activations=0,
                gradients=max(min(gradients, held - kept), 0) if with_gradients else 0,
                hbm_bytes=hbm_bytes,
                core=f"{core}, pipeline rank {rank}",
                program="" if piece is None else piece.inspection.name,
                rank=rank,
                stages=log.schedule.stages_of(rank),
                stays=stays,
                task="" if piece is None else NAMES[piece.kind],
            )
        )
    return tuple(made)


def _peak(piece: Piece | None) -> int:
    """What a program needs besides all that is held when it starts."""
    if piece is None:
        return 0
    plan = piece.inspection.memory
    return plan.results - plan.in_place + plan.temporaries


def _taken(found: Sequence[Piece]) -> set[int]:
    """The storages, by id, that programs of the step took or gave."""
    refs = (ref for piece in found for ref in (*piece.program.held_by, *piece.program.results_held_by) if ref is not None)
    return {id(storage) for ref in refs if (storage := ref()) is not None}


def _kept(known: Owned, mesh: Any, taken: set[int]) -> tuple[dict[str, int], int]:
    """What stays on a core of the mesh of a place by kind, with what lies on all cores and programs of the step use; and the gradients of its parameters."""
    stays, gradients = dict.fromkeys(STAYS, 0), 0
    for key, (owner, t) in known.items():
        place = placed.place_of(t)
        if (key not in taken) if place is None else place.mesh != mesh:
            continue
        if owner.kind in STAYS:
            stays[owner.kind] += _bytes(t)
        if owner.kind == "parameter" and t.requires_grad:
            held = getattr(t, "main_grad", None)
            gradients += _bytes(t if held is None else held)
    return {kind: n for kind, n in stays.items() if n}, gradients


def _is_abstract(t: XLATensor) -> bool:
    """Whether it is of an abstract run: beside one, others may have real tensors on the same mesh."""
    return isinstance(alone(t._storage.held), AbstractArray)


def _bytes(t: Any) -> int:
    layout = t._storage.layout
    return int(layout.numel) * int(layout.dtype.itemsize)


# -- what is held when a program starts ------------------------------------------------------------


Moment = tuple[int, bool, Piece]
"""What a core holds when a program starts, whether gradients are among it, and the program."""


def _counted(own: Sequence[Piece], run: abstract.Run) -> Iterator[Moment]:
    """In an abstract run: the arrays that there were."""
    for piece in own:
        recorded = run.programs.get(id(piece.program))
        if recorded is not None:
            yield *run.most(recorded), piece


def _planned(log: StepLog, rank: int, own: Sequence[Piece], stays: int, gradients: int) -> Iterator[Moment]:
    """In a real run: what stays, gradients, and for every micro-batch whose backward pass is still to come what that pass takes."""
    assert log.schedule is not None
    of_task: dict[Task, list[Piece]] = {}
    for piece in own:
        if piece.task is None:
            yield max(stays + gradients, piece.inspection.memory.arguments), True, piece
        else:
            of_task.setdefault(piece.task, []).append(piece)
    order = log.schedule.orders[rank]
    counts = Counter((action.stage, action.kind) for action in order)
    arriving = {stage: _arriving(log, stage) for stage in log.schedule.stages_of(rank)}
    saved = {stage: max(_saved(of_task, stage, counts) - arriving[stage], 0) for stage in log.schedule.stages_of(rank)}
    waiting, done = dict.fromkeys(saved, 0), Counter[Task]()
    for stage, kind, _ in order:
        task = Task(stage, kind)
        forward = kind is Kind.FORWARD
        there = any(done[Task(s, k)] for s in saved for k in _FILLS)
        held = stays + there * gradients + sum(saved[k] * n for k, n in waiting.items())
        for piece in _at(of_task.get(task, ()), done[task], counts[task]):
            yield held + (_inputs(piece) if forward else arriving[stage]), there, piece
        done[task] += 1
        waiting[stage] += forward - (kind in _FILLS)


_FILLS = (Kind.BACKWARD, Kind.WEIGHT_BACKWARD)
"""After these there are gradients, and what a micro-batch kept is gone."""


def _at(pieces: Sequence[Piece], number: int, count: int) -> Iterator[Piece]:
    """The programs of the `number`-th of `count` passes: the first passes may have other programs, for there are no gradients yet to add to."""
    first = 0
    for piece in pieces:
        if piece.runs >= count or first <= number < first + piece.runs:
            yield piece
        first += piece.runs if piece.runs < count else 0


def _arriving(log: StepLog, stage: int) -> int:
    """The gradients of a micro-batch that later stages send this one."""
    found = (size // count for sent, (count, size) in log.sent.items() if sent.target == stage and sent.kind is not Kind.FORWARD)
    return max(found, default=0)


def _saved(of_task: Mapping[Task, Sequence[Piece]], stage: int, counts: Mapping[Any, int]) -> int:
    """What a stage's backward pass takes of one micro-batch: what the first one takes that nobody owns, for there are no gradients yet to add to."""
    for kind in (Kind.BACKWARD, Kind.INPUT_BACKWARD):
        task = Task(stage, kind)
        if task in of_task:
            return sum(_inputs(piece) for piece in _at(of_task[task], 0, counts[task]))
    return 0


def _inputs(piece: Piece) -> int:
    """What a program takes that nobody owns."""
    return sum(h.bytes for h in piece.inspection.memory.held if h.kind == "input" and h.role != "result")


# -- the table -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StageRow:
    """Pipeline ranks whose cores need the same. Bytes on a core, when it needs most.

    ranks, stages: "1-14". parameters (with buffers), gradients, master_weights, optimizer_state, activations, temporaries: add up to `peak`. task: what runs
    then. share: of the core's memory.
    """

    ranks: str
    stages: str
    parameters: int
    gradients: int
    master_weights: int
    optimizer_state: int
    activations: int
    temporaries: int
    peak: int
    share: float
    task: str


_COLUMNS = (
    Column("rank", "ranks"),
    Column("stages", "stages"),
    Column("parameters", "parameters", units.size, number=True),
    Column("gradients", "gradients", units.size, number=True),
    Column("master weights", "master_weights", units.size, number=True),
    Column("optimizer state", "optimizer_state", units.size, number=True),
    Column("activations, other", "activations", units.size, number=True),
    Column("temporaries", "temporaries", units.size, number=True),
    Column("peak", "peak", units.size, number=True),
    Column("of the core's memory", "share", lambda s: f"{s:.1%}", number=True),
    Column("when", "task"),
)


def table(found: Sequence[RankMemory], counted: bool) -> Table[StageRow]:
    """A row for each rank; ranks that need the same have one. counted: by the arrays of an abstract run."""
    groups: dict[tuple[Any, ...], list[RankMemory]] = {}
    for memory in found:
        groups.setdefault((tuple(memory.kinds().items()), memory.task, len(memory.stages)), []).append(memory)
    rows = [_row(group) for group in groups.values()]
    most = max(found, key=lambda m: m.peak)
    how = (
        "activations are the arrays of the run, counted"
        if counted
        else "activations follow from the schedule and what backward passes take"
    )
    return Table("Memory of a core of each pipeline rank", rows, _COLUMNS, f"{most.verdict}; {how}")


def _row(group: Sequence[RankMemory]) -> StageRow:
    first = group[0]
    kinds = first.kinds()
    stages = sorted(stage for memory in group for stage in memory.stages)
    return StageRow(
        ranks=spans(memory.rank for memory in group),
        stages=spans(stages),
        parameters=kinds.get("parameter", 0) + kinds.get("buffer", 0),
        gradients=kinds.get("gradient", 0),
        master_weights=kinds.get("master weight", 0),
        optimizer_state=kinds.get("optimizer state", 0),
        activations=kinds.get("activations", 0),
        temporaries=kinds.get("temporaries", 0),
        peak=first.peak,
        share=first.peak / first.hbm_bytes if first.hbm_bytes else math.inf,
        task=first.task,
    )
