"""What an abstract run found out, as data and as text."""

from __future__ import annotations

import dataclasses

from nxd_jax.inspect.collectives import Collective
from nxd_jax.inspect.stage_memory import RankMemory, StageRow
from nxd_jax.inspect.stages import StageProgram, collective_lines
from nxd_jax.inspect.tables import Table


@dataclasses.dataclass(frozen=True)
class ProgramReport:
    """One compiled program. Sizes are bytes on one core, as XLA lays the program out.

    name: the file and line of its last op. ops: aten ops in it. runs: how often the script ran it.
    arguments, outputs: what it takes and gives; aliased: outputs that take over the memory of arguments (updates in place).
    temporaries: what it needs besides while it runs. collectives: of one run.
    trace_seconds, lower_seconds, compile_seconds: to a jaxpr, to StableHLO, by XLA.
    """

    name: str
    ops: int
    runs: int
    arguments: int
    outputs: int
    aliased: int
    temporaries: int
    collectives: tuple[Collective, ...]
    trace_seconds: float
    lower_seconds: float
    compile_seconds: float

    @property
    def seconds(self) -> float:
        """To trace, lower and compile it."""
        return self.trace_seconds + self.lower_seconds + self.compile_seconds

    @property
    def peak(self) -> int:
        """Bytes that a core needs while it runs: arguments, outputs that are new, temporaries."""
        return self.arguments + self.outputs - self.aliased + self.temporaries


@dataclasses.dataclass(frozen=True)
class PipelineReport:
    """A training step of a pipeline. Sizes are bytes on one core.

    name: the schedule and its numbers. ranks: the memory of every pipeline rank when it needs most. stages: the same as a table, a row for ranks that need the
    same. programs: what each rank runs in a step. collectives: what its cores send in a step.
    """

    name: str
    ranks: tuple[RankMemory, ...]
    stages: Table[StageRow]
    programs: Table[StageProgram]
    collectives: Table[Collective]

    def __str__(self) -> str:
        tables = "\n\n".join(map(str, (self.stages, self.programs)))
        return "\n".join([self.name, "", tables, "", *collective_lines(self.collectives)])


@dataclasses.dataclass(frozen=True)
class AbstractReport:
    """What `AbstractRun.report` gives; `print` shows it as text. Sizes are bytes on one core, of a pipeline on one of the rank that needs most.

    cores: ranks of the world. axes: the mesh axes and their sizes, outermost first. core, hbm_bytes: the emulated core and its memory.
    kinds: of the tensors that the script keeps, by shape: "parameter", "buffer", "gradient", "master weight", "optimizer state".
    programs: those compiled, the largest first; skipped: programs that were not. record_seconds: from the start of the run, without compiling.
    host_bytes: the most memory that this process had so far. pipeline: of a training step of one, None without.
    """

    cores: int
    axes: dict[str, int]
    core: str
    hbm_bytes: int
    kinds: dict[str, int]
    programs: tuple[ProgramReport, ...]
    skipped: int
    record_seconds: float
    host_bytes: int
    pipeline: PipelineReport | None = None

    @property
    def kept(self) -> int:
        """Bytes of everything that lives from step to step (all kinds but gradients)."""
        return sum(n for kind, n in self.kinds.items() if kind != "gradient")

    @property
    def peak(self) -> int:
        """The largest `peak` of a program, or what is kept if that is more. In a pipeline, of a rank with all that it holds while a program runs."""
        if self.pipeline is not None:
            return max(memory.peak for memory in self.pipeline.ranks)
        return max([self.kept, *(p.peak for p in self.programs)])

    @property
    def fits(self) -> bool:
        """Whether `peak` is within the core's memory."""
        return self.peak <= self.hbm_bytes

    def __str__(self) -> str:
        axes = " x ".join(f"{name} {n}" for name, n in self.axes.items() if n > 1) or "one rank"
        lines = [f"{self.cores} cores ({axes}), each {self.core} with {_size(self.hbm_bytes)}"]
        if self.pipeline is not None:
            lines += [
                str(self.pipeline),
                f"compiled in {sum(p.seconds for p in self.programs):.1f} s: {len(self.programs)} different programs",
            ]
        else:
            kinds = ", ".join(f"{kind} {_size(n)}" for kind, n in self.kinds.items() if n)
            lines.append(f"  by shape, per core: {kinds or 'nothing'}")
            for p in self.programs:
                lines += _lines(p)
        if self.skipped:
            lines.append(f"  {self.skipped} smaller programs (initialisation and the like) were not compiled")
        verdict = "fits" if self.fits else "does not fit"
        lines.append(f"  peak {_size(self.peak)} of {_size(self.hbm_bytes)} per core ({self.peak / self.hbm_bytes:.0%}): {verdict}")
        lines.append(f"  recorded in {self.record_seconds:.1f} s; this process took at most {_size(self.host_bytes)}")
        return "\n".join(lines)


def _lines(p: ProgramReport) -> list[str]:
    seconds = f"traced in {p.trace_seconds:.1f} s, lowered in {p.lower_seconds:.1f} s, compiled in {p.compile_seconds:.1f} s"
    lines = [f"  program at {p.name or 'unknown line'}: {p.ops} ops, run {p.runs} times; {seconds}"]
    lines.append(
        f"    XLA, per core: arguments {_size(p.arguments)}, outputs {_size(p.outputs)} ({_size(p.aliased)} in place), temporaries "
        f"{_size(p.temporaries)}, peak {_size(p.peak)}"
    )
    for c in p.collectives:
        lines.append(f"    {c.count} x {c.kind} along {', '.join(c.axes)} (groups of {c.ranks}), {_size(c.bytes)} per core")
    return lines


def _size(count: int) -> str:
    """Bytes in the largest unit of which there is at least one."""
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if abs(count) >= 2**power:
            return f"{count / 2**power:.2f} {unit}"
    return f"{count} B"
