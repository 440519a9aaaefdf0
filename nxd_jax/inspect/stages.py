"""The programs of a pipeline's training step by rank and task: programs that do the same on different ranks are looked at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from nxd_jax.inspect import collectives, units
from nxd_jax.inspect.collectives import Collective
from nxd_jax.inspect.inspection import Inspection
from nxd_jax.inspect.tables import Column, Table
from nxd_jax.pipeline.schedules import Kind
from nxd_jax.pipeline.step_log import StepLog, Task

NAMES = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.INPUT_BACKWARD: "backward of the input",
    Kind.WEIGHT_BACKWARD: "backward of the weights",
    None: "outside",
}
"""Of tasks. "outside" the passes: the reduction of gradients, the optimizer, and whatever else the script does."""


@dataclass(frozen=True)
class Piece:
    """A program that the cores of a pipeline rank run in a step.

    rank: None for one that all ranks run together. task: None outside of the passes. runs: in the step, for this task. structure: the same for programs that
    do the same. inspection: of a program of this structure.
    """

    rank: int | None
    task: Task | None
    runs: int
    structure: str
    program: Any
    inspection: Inspection

    @property
    def kind(self) -> Kind | None:
        """Of its task."""
        return None if self.task is None else self.task.kind


def pieces(log: StepLog, inspected: Callable[[Any], Inspection], structure: Callable[[Any], str]) -> tuple[Piece, ...]:
    """Those of a step, in the order in which they ran first. inspected: looks at a program; structure: names what it does."""
    assert log.schedule is not None
    ranks = {home.mesh: rank for home, rank in zip(log.homes, log.schedule.placement, strict=True) if home is not None}
    seen: dict[str, Inspection] = {}
    found = []
    for program, tasks in list(log.ran.items()):
        labels = program.spec.labels
        name = structure(program)
        if name not in seen:
            seen[name] = inspected(program)
        rank = None if labels is None else ranks.get(labels.mesh)
        found += [Piece(rank, task, runs, name, program, seen[name]) for task, runs in tasks.items()]
    return tuple(found)


def spans(numbers: Iterable[int]) -> str:
    """Numbers as people write them: 0, 2-14."""
    runs: list[list[int]] = []
    for n in sorted(numbers):
        if runs and runs[-1][1] == n - 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


# -- programs -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StageProgram:
    """A program that some pipeline ranks run in a step, each on its own cores.

    ranks: "0", "1-14"; "all together" for one on the mesh of all ranks. task: one of `NAMES`. runs: of one rank in a step. ops: aten ops. arguments, results,
    in_place, temporaries: bytes on a core, by XLA's plan. flops: in products, on a core, of one run. line: of its last op.
    """

    ranks: str
    task: str
    runs: int
    ops: int
    arguments: int
    results: int
    in_place: int
    temporaries: int
    flops: int
    line: str


_PROGRAMS = (
    Column("rank", "ranks"),
    Column("task", "task"),
    Column("runs", "runs", number=True),
    Column("ops", "ops", number=True),
    Column("arguments", "arguments", units.size, number=True),
    Column("results", "results", units.size, number=True),
    Column("in place", "in_place", units.size, number=True),
    Column("temporaries", "temporaries", units.size, number=True),
    Column("product FLOP", "flops", units.count, number=True),
    Column("line", "line"),
)


def programs(found: Sequence[Piece]) -> Table[StageProgram]:
    """A row for each program and task; ranks whose programs do the same have one."""
    groups: dict[tuple[str, Kind | None, int], list[Piece]] = {}
    for piece in found:
        groups.setdefault((piece.structure, piece.kind, piece.runs), []).append(piece)
    order = {kind: k for k, kind in enumerate(NAMES)}
    ordered = sorted(groups.values(), key=lambda g: (order[g[0].kind], _first(g[0]), -len(g[0].inspection.graph)))
    rows = [_program_row(group) for group in ordered]
    distinct = len({piece.structure for piece in found})
    note = f"{units.many(distinct, 'different program')} of {len({id(p.program) for p in found})} on all ranks"
    return Table("Programs of a step", rows, _PROGRAMS, note)


def _first(piece: Piece) -> int:
    return -1 if piece.rank is None else piece.rank


def _program_row(group: Sequence[Piece]) -> StageProgram:
    piece = group[0]
    plan, looked = piece.inspection.memory, piece.inspection
    return StageProgram(
        ranks=label(p.rank for p in group),
        task=NAMES[piece.kind],
        runs=piece.runs,
        ops=sum(n.op not in ("input", "output") for n in looked.graph),
        arguments=plan.arguments,
        results=plan.results,
        in_place=plan.in_place,
        temporaries=plan.temporaries,
        flops=looked.costs.flops,
        line=looked.name.removeprefix("the program at "),
    )


def label(ranks: Iterable[int | None]) -> str:
    """Pipeline ranks in words."""
    numbers = {rank for rank in ranks if rank is not None}
    return spans(numbers) if numbers else "all together"


# -- collectives ----------------------------------------------------------------------------------


def collectives_by_stage(found: Sequence[Piece], log: StepLog) -> Table[Collective]:
    """Of a step, all runs together: what the cores of each pipeline rank send one another, and what ranks send the next ones (a permute along pp)."""
    of_rank: dict[int | None, dict[Collective, tuple[int, int]]] = {}
    for piece in found:
        sums = of_rank.setdefault(piece.rank, {})
        for c in piece.inspection.collectives:
            _add(sums, c, piece.runs * c.count, piece.runs * c.bytes)
    for sent, (count, size) in log.sent.items():
        assert log.schedule is not None
        source, target = (log.schedule.placement[stage] for stage in (sent.source, sent.target))
        phase = "forward" if sent.kind is Kind.FORWARD else "backward"
        to = {1: "to the next rank", -1: "to the rank before"}.get(target - source, f"to rank {target}")
        _add(of_rank.setdefault(source, {}), Collective("permute", ("pp",), 2, 0, 0, line=to, phase=phase), count, size)
    alike: dict[Collective, list[int | None]] = {}
    for rank, sums in of_rank.items():
        for c, (count, size) in sums.items():
            alike.setdefault(dataclasses.replace(c, count=count, bytes=size), []).append(rank)
    rows = [dataclasses.replace(c, stage=label(ranks)) for c, ranks in alike.items()]
    rows.sort(key=lambda c: -c.bytes)
    return Table("Collectives of a step", rows, (Column("rank", "stage"), *collectives.COLUMNS), _note(of_rank), 40)


def _add(sums: dict[Collective, tuple[int, int]], c: Collective, count: int, size: int) -> None:
    key = dataclasses.replace(c, count=0, bytes=0)
    known = sums.get(key, (0, 0))
    sums[key] = known[0] + count, known[1] + size


def _note(of_rank: dict[int | None, dict[Collective, tuple[int, int]]]) -> str:
    totals = {rank: sum(size for _, size in sums.values()) for rank, sums in of_rank.items() if sums}
    if not totals:
        return "no rank communicates"
    most = max(totals, key=lambda rank: totals[rank])
    where = "the cores of all ranks together" if most is None else f"a core of rank {most}"
    return f"most are those of {where}: {units.size(totals[most])} of inputs in a step"


def collective_lines(found: Table[Collective], most: int = 60) -> list[str]:
    """`collectives_by_stage` as text: for each rank, kind and axes a line, wherever they come from."""
    of_rank: dict[str, dict[Collective, tuple[int, int]]] = {}
    for c in found:
        for rank in _numbers(c.stage):
            _add(of_rank.setdefault(rank, {}), Collective(c.kind, c.axes, c.ranks, 0, 0), c.count, c.bytes)
    alike: dict[tuple[tuple[Collective, tuple[int, int]], ...], list[str]] = {}
    for rank, of_one in of_rank.items():
        alike.setdefault(tuple(sorted(of_one.items(), key=lambda item: -item[1][1])), []).append(rank)
    lines = [f"{found.title}: {found.note}"]
    for same, ranks in sorted(alike.items(), key=lambda item: (not item[1][0].isdigit(), len(item[1][0]), item[1][0])):
        lines.append(f"  rank {spans(map(int, ranks))}" if ranks[0].isdigit() else f"  {ranks[0]}")
        for c, (count, size) in same:
            lines.append(f"    {count} x {c.kind} along {' x '.join(c.axes)} (groups of {c.ranks}), {units.size(size)} per core")
    left = len(lines) - 1 - most
    return lines if left <= 0 else [*lines[: most + 1], f"  ... and {left} more lines (.collectives has all)"]


def _numbers(label: str) -> list[str]:
    """The ranks that `label` gives, each as text."""
    if not label[0].isdigit():
        return [label]
    ends = [part.split("-") for part in label.split(", ")]
    return [str(n) for part in ends for n in range(int(part[0]), int(part[-1]) + 1)]
