"""`look` at a training step of a pipeline: all stages' programs, memory of each rank, what is sent, and how long a step would take."""

from __future__ import annotations

import copy
import dataclasses
import os
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

from nxd_jax.inspect import collectives, stage_memory, stage_times, stages, subjects
from nxd_jax.inspect.collectives import Collective
from nxd_jax.inspect.costs import Cost, Costs
from nxd_jax.inspect.estimate import DOCUMENTED, Constants, Estimate, estimate
from nxd_jax.inspect.inspection import Inspection
from nxd_jax.inspect.owners import owned
from nxd_jax.inspect.stage_memory import RankMemory, StageRow
from nxd_jax.inspect.stages import Piece, StageProgram
from nxd_jax.inspect.tables import Table, plain
from nxd_jax.inspect.traffic import Traffic, traffic_among
from nxd_jax.pipeline import step_log
from nxd_jax.pipeline.step_log import StepLog
from nxd_jax.topology import Topology
from torch_bridge.compiler import cache_keys
from torch_bridge.mesh import places, sharding, world
from torch_bridge.runtime import abstract


class PipelineInspection(Inspection):
    """A training step of a pipeline.

        step = inspect.look()    # the last executed step
        step.stages              # memory of a core of each pipeline rank; equal ranks have one row
        step.programs            # what each rank runs, by task
        step.collectives         # what its cores send, by rank, in the whole step
        step.estimate()          # with the idle time of the schedule

    memory: that of the rank that needs most. costs, traffic: of the whole step; costs on a core of the rank that computes most. The other parts (graph,
    stablehlo, optimized, jaxpr, fx) are of the largest program, and `others` has the rest, one of those that do the same.
    """

    def __init__(self, log: StepLog, run: abstract.Run | None = None, topology: Topology | None = None):
        self._log = copy.copy(log)
        self._run = run
        self._axes = dict(world.current().axes) if sharding.active() else {}
        self._known = owned()
        owners = {key: owner for key, (owner, _) in self._known.items()}
        recorded = {} if run is None else run.programs

        def inspected(program: Any) -> Inspection:
            return Inspection(subjects.OfProgram(program, recorded.get(id(program)), owners), topology)

        def structure(program: Any) -> str:
            found = recorded.get(id(program))
            return cache_keys.structure(program.spec) if found is None else found.structure

        self._pieces = stages.pieces(self._log, inspected, structure)
        distinct = {piece.structure: piece.inspection for piece in self._pieces}
        largest, *others = sorted(distinct.values(), key=lambda i: -len(i.program.graph.nodes))
        super().__init__(largest._subject, topology, tuple(others))

    @property
    def name(self) -> str:
        plan = self._plan
        several = f"{plan.stages} stages on {plan.ranks} ranks" if plan.stages != plan.ranks else f"{plan.ranks} stages"
        return f"a step of the pipeline ({plan.name}, {several}, {plan.microbatches} micro-batch{'es' * (plan.microbatches != 1)})"

    @property
    def axes(self) -> dict[str, int]:
        return dict(self._axes)

    @property
    def _plan(self) -> Any:
        return self._log.schedule

    @property
    def runs(self) -> int:
        """Training steps of pipelines in this process so far."""
        return step_log.LOG.steps

    @property
    def compile_seconds(self) -> float:
        """Of all programs together."""
        return sum(i.compile_seconds for i in {p.structure: p.inspection for p in self._pieces}.values())

    # -- by stage -------------------------------------------------------------------------------------

    @cached_property
    def ranks(self) -> tuple[RankMemory, ...]:
        """The memory of a core of every pipeline rank."""
        core = f"a core of {self.topology.chip.name} at LNC {self.topology.lnc}"
        return stage_memory.of_ranks(self._log, self._pieces, self._known, self._run, self.topology.hbm_per_core, core)

    @cached_property
    def stages(self) -> Table[StageRow]:
        """The same as a table: ranks that need the same have one row."""
        return stage_memory.table(self.ranks, self._run is not None)

    @cached_property
    def programs(self) -> Table[StageProgram]:
        """What each rank runs: a row for each program and task; ranks whose programs do the same have one."""
        return stages.programs(self._pieces)

    @cached_property
    def memory(self) -> RankMemory:
        """Of the rank that needs most."""
        return max(self.ranks, key=lambda m: m.peak)

    @cached_property
    def collectives(self) -> Table[Collective]:
        """What the cores of each rank send each other in a step, and ranks the next ones (permutes along pp)."""
        return stages.collectives_by_stage(self._pieces, self._log)

    @cached_property
    def costs(self) -> Costs:
        """Of a step, on a core of the rank that computes most."""
        of_rank = [_costs(self._of(rank)) for rank in range(self._plan.ranks)]
        return max(of_rank, key=lambda c: c.flops)

    def _of(self, rank: int) -> list[Piece]:
        return [piece for piece in self._pieces if piece.rank in (rank, None)]

    # -- on the machine --------------------------------------------------------------------------------

    @cached_property
    def traffic(self) -> Traffic:
        return traffic_among(self._cores_in_use, self._grouped(), self._messages())

    def memory_picture(self, path: str | os.PathLike[str] | None = None) -> Any:
        """The memory of a core of each pipeline rank by kind beside its HBM; ranks that need the same have one bar."""
        from nxd_jax.inspect.pictures import memory_picture

        groups: dict[str, dict[str, int]] = {}
        for row in self.stages:
            first = int(row.ranks.split("-")[0].split(",")[0])
            groups[f"rank {row.ranks}"] = self.ranks[first].kinds()
        return memory_picture(list(groups.items()), self.topology.hbm_per_core, path=path)

    def _grouped(self) -> Iterable[tuple[Collective, Sequence[Sequence[int]]]]:
        for rank in (None, *range(self._plan.ranks)):
            narrow = None if rank is None else self._place(rank)
            own = set() if narrow is None else set(narrow.order)
            sums = collectives.summary(
                dataclasses.replace(c, count=p.runs * c.count, bytes=p.runs * c.bytes)
                for p in self._pieces
                if p.rank == rank
                for c in p.inspection.collectives
            )
            for c in sums:
                groups = self.groups(c.axes)
                yield c, groups if rank is None else [group for group in groups if own.issuperset(group)]

    def _place(self, rank: int) -> Any:
        """The ranks of the world that have this rank along pp."""
        home = self._log.homes[self._plan.placement.index(rank)]
        return None if home is None or home.mesh is None else places.ranks(home.mesh)

    def _messages(self) -> Iterable[tuple[int, int, float]]:
        for sent, (_, size) in self._log.sent.items():
            source, target = (self._place(self._plan.placement[stage]) for stage in (sent.source, sent.target))
            if source is not None and target is not None:
                yield from ((a, b, float(size)) for a, b in zip(source.order, target.order, strict=True))

    def estimate(
        self, topology: Topology | None = None, *, dtype: str = "bfloat16", sequences: int = 0, constants: Constants | None = None
    ) -> Estimate:
        """How long a step would take on the machine: the programs of the rank that computes longest, and what it waits by the schedule if every computation
        takes what the roofline says. The reduction of gradients and the optimizer come after. The arguments are those of `Inspection.estimate`."""
        machine, reached = topology or self.topology, constants or DOCUMENTED
        work = stage_times.step_work(
            self._log,
            self._pieces,
            self.axes,
            name=self.name,
            dtype=dtype,
            sequences=sequences,
            topology=machine,
            constants=reached,
            groups=self.groups,
        )
        return estimate(work, machine, constants=reached, groups=self.groups)

    # -- out of here -----------------------------------------------------------------------------------

    def stages_html(self) -> str:
        return self.stages.html() + self.programs.html()

    def data(self, *parts: str) -> dict[str, Any]:
        """As of any program, and "stages" and "programs": the tables."""
        return super().data(*parts) | {"stages": plain(self.stages), "programs": plain(self.programs)}

    def _lines(self) -> list[str]:
        axes = " x ".join(f"{a} {n}" for a, n in self.axes.items() if n > 1)
        found = [f"{self.name}, {axes}, run {self.runs} times"]
        found += ["", *str(self.stages).splitlines(), "", *str(self.programs).splitlines(), "", *stages.collective_lines(self.collectives)]
        found += ["", "see .stages .programs .collectives .estimate() .graph .others; .save(path) writes JSON"]
        return found

    def _repr_html_(self) -> str:
        parts = [self.stages.html(), self.programs.html(), self.collectives[:24].html()]
        sections = "".join(f'<div style="margin-top:10px">{p}</div>' for p in parts)
        return f'<div style="font:13px/1.5 system-ui,sans-serif"><b>{self.name}</b>{sections}</div>'


def _costs(found: Sequence[Piece]) -> Costs:
    rows = tuple(
        Cost(r.module, r.line, r.op, r.phase, p.runs * r.flops, p.runs * r.other, p.runs * r.bytes, p.runs * r.calls)
        for p in found
        for r in p.inspection.costs.rows
    )
    return Costs(rows, all(p.inspection.costs.complete for p in found))
