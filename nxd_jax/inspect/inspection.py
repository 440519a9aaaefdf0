"""`Inspection`: what there is to see of one program."""

from __future__ import annotations

import html as markup
import json
import logging
import math
import os
import pathlib
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import fx

from nxd_jax.inspect import collectives, costs, nodes, partitioned, subjects, units
from nxd_jax.inspect.collectives import Collective
from nxd_jax.inspect.costs import Costs
from nxd_jax.inspect.estimate import DOCUMENTED, Constants, Estimate, estimate, program_work
from nxd_jax.inspect.hlo import HloText
from nxd_jax.inspect.memory import Memory
from nxd_jax.inspect.nodes import Node
from nxd_jax.inspect.tables import Table, plain, write
from nxd_jax.inspect.traffic import Traffic, traffic
from nxd_jax.topology import Topology
from nxd_jax.topology.layouts import KINDS
from torch_bridge import _compat
from torch_bridge.compiler import dump
from torch_bridge.mesh import spmd, world

logger = logging.getLogger("nxd_jax")

PARTS = ("graph", "collectives", "memory", "costs")
"""What `Inspection.data` holds."""

_STALE = "found in a cache on disk, with the module names and source lines of the run that compiled it; NEURON_FRAMEWORK_DEBUG=1 compiles it anew"


class Inspection:
    """What there is to see of one program. Every part is worked out when it is asked for, prints, shows in notebooks and is plain data.

        step = inspect.look()          # the last executed step
        step.graph                     # aten ops with module paths and source lines
        step.stablehlo.find(module="layers.0")
        step.collectives               # kind, mesh axes, ranks, bytes, count, module, line
        step.memory                    # of a core, by kind, against the emulated core's
        step.costs.by("module", depth=2)

    others: further programs of the same step, smaller ones. topology: the machine whose cores are meant.
    """

    def __init__(self, subject: subjects.Subject, topology: Topology | None = None, others: tuple[Inspection, ...] = ()):
        self._subject = subject
        self.topology = machine(topology)
        self.others = others

    @property
    def name(self) -> str:
        """What was looked at, in words."""
        return self._subject.name

    @property
    def program(self) -> Any:
        """The `torch_bridge` program, None for what never ran as one."""
        return getattr(self._subject, "program", None)

    @property
    def axes(self) -> dict[str, int]:
        """The mesh axes and their sizes, outermost first; {} for one rank."""
        return dict(self._subject.axes)

    @property
    def runs(self) -> int:
        """How often the program ran."""
        return self._subject.runs

    @property
    def compile_seconds(self) -> float:
        """Seconds that tracing, lowering and compiling took, 0 if nothing was compiled."""
        return self._subject.compile_seconds

    @cached_property
    def graph(self) -> Table[Node]:
        """Every aten op, with its module, source line and phase."""
        return nodes.table(self._subject.graph, self._subject.names())

    @cached_property
    def fx(self) -> fx.GraphModule:
        """The same as a `torch.fx.GraphModule`, which prints as Python code and runs in eager torch."""
        return fx.GraphModule(torch.nn.Module(), self._subject.graph, "Recorded")

    @cached_property
    def jaxpr(self) -> Any:
        """What JAX traced: a closed jaxpr."""
        return self._subject.jaxpr

    @cached_property
    def stablehlo(self) -> HloText:
        """What is given to the compiler. `.find(module=...)` finds lines."""
        lowered = self._subject.lowered
        with _compat.enable_x64():
            return HloText(lowered.as_text(debug_info=True), "stablehlo")

    @cached_property
    def optimized(self) -> HloText:
        """What the compiler made of it for the machine that runs it here. (A note says so if it has the module names and lines of an earlier run.)"""
        found = HloText(self._subject.compiled.as_text(), "optimized")
        if nodes.of_another_run(self._subject.graph, (h.line for h in found.lines)):
            found.note = _STALE
            logger.info("the optimized HLO of %s: %s", self.name, _STALE)
        return found

    @cached_property
    def collectives(self) -> Table[Collective]:
        """What the ranks send to each other in one run, by kind, mesh axes, module and line."""
        if self._subject.partitioned:
            return partitioned.table(self._subject.compiled.as_text(), self.axes)
        return collectives.table(self.jaxpr, self.axes)

    @cached_property
    def costs(self) -> Costs:
        """Operations and bytes by module, line, op or phase, on one core in one run; of an annotated program, on all cores together."""
        return costs.costs(self.jaxpr, math.prod(self.axes.values()) if self._subject.partitioned else 1)

    @cached_property
    def memory(self) -> Memory:
        """Bytes on one core while it runs, by kind, against the memory of the emulated core."""
        core = f"a core of {self.topology.chip.name} at LNC {self.topology.lnc}"
        return self._subject.memory(self.topology.hbm_per_core, core)

    # -- on the machine --------------------------------------------------------------------------------

    def groups(self, axes: Sequence[str]) -> list[list[int]]:
        """The groups of ranks that communicate along mesh axes, each in the order of the axes."""
        return self._subject.groups(axes)

    @cached_property
    def traffic(self) -> Traffic:
        """Bytes that one run puts on every NeuronLink, on the network, and between the cores of a chip. Raises ValueError if the machine has too few cores."""
        return traffic(self._cores_in_use, self.collectives, self.groups)

    @property
    def _cores_in_use(self) -> Topology:
        """The machine with as many cores as there are ranks."""
        found, ranks = self.topology, math.prod(self.axes.values())
        if found.node_count > 1 or ranks >= found.core_count:
            return found
        return Topology(found.instance, lnc=found.lnc, visible=found.visible[:ranks])

    def estimate(
        self, topology: Topology | None = None, *, dtype: str = "bfloat16", sequences: int = 0, constants: Constants | None = None
    ) -> Estimate:
        """How long one run would take on the machine (default: `topology` of this inspection): a roofline, every term shown (docs/explanation/estimate.md).

        dtype: of matrix products. sequences: that the whole job works on in a step, for sequences/s. constants: what is reached of the peaks, default
        `estimate.DOCUMENTED`. Memory traffic is counted as if no ops were fused, an upper bound.
        """
        if self._subject.partitioned:
            raise NotImplementedError(
                "estimate: the costs of an annotated program are those of whole tensors, and how XLA divided each op is not known. Use .collectives, .memory "
                "and .traffic, which are those of a core; or estimate the same model as a script of ranks"
            )
        work = program_work(self.costs, self.collectives, self.axes, dtype=dtype, name=self.name, sequences=sequences)
        return estimate(work, topology or self.topology, constants=constants or DOCUMENTED, groups=self.groups)

    def memory_picture(self, path: str | os.PathLike[str] | None = None) -> Any:
        """The memory of a core by kind beside its HBM: a matplotlib figure, saved too if there is a path. Needs matplotlib."""
        from nxd_jax.inspect.pictures import memory_picture

        return memory_picture([(self.name, self.memory.kinds())], self.topology.hbm_per_core, path=path)

    def topology_picture(self, by: str | Sequence[str] | None = None, path: str | os.PathLike[str] | None = None) -> Any:
        """The machine with the groups of ranks and the bytes on every link: a matplotlib figure, saved too if there is a path. Needs matplotlib.

        by: which groups colour the cores ("tp", "dp", "ep", ...); default all that there are.
        """
        from nxd_jax.inspect.pictures import topology_picture

        used = self._cores_in_use
        kinds = {kind: [a for a in axes if self.axes.get(a, 1) > 1] for kind, axes in _kinds(self.axes).items()}
        shown = [kind for kind, axes in kinds.items() if axes]
        alone = [[rank] for rank in range(used.core_count)]
        groups = {kind: self.groups(kinds[kind]) if kind in shown else alone for kind in KINDS} if shown else None
        traffic = self.traffic if self.collectives.rows else None
        return topology_picture(used, groups, by or shown or None, traffic, path=path)

    # -- out of here -----------------------------------------------------------------------------------

    def stages_html(self) -> str:
        """For a report: what stages of a pipeline need and run; "" for what is no step of a pipeline."""
        return ""

    def data(self, *parts: str) -> dict[str, Any]:
        """All of this, or some of `PARTS`, as plain dictionaries and lists. Raises ValueError for another part."""
        wrong = [p for p in parts if p not in PARTS]
        if wrong:
            raise ValueError(f"{wrong[0]!r} must be one of {', '.join(map(repr, PARTS))}")
        made: dict[str, Any] = {"name": self.name, "axes": self.axes, "runs": self.runs, "compile_seconds": self.compile_seconds}
        for part in parts or PARTS:
            found = getattr(self, part)
            made[part] = found.by("module", "line", "op", "phase").data() if part == "costs" else plain(found)
            if part == "memory":
                made[part] |= {"peak": found.peak, "fits": found.fits, "kinds": found.kinds()}
        return made

    def save(self, path: str | os.PathLike[str], *parts: str) -> pathlib.Path:
        """Write `data` as JSON; the path."""
        return write(path, json.dumps(self.data(*parts), indent=1))

    def report(self, path: str | os.PathLike[str], title: str = "") -> pathlib.Path:
        """Write all of this as one HTML file that needs nothing else (no network), under 5 MB; the path. Pictures need matplotlib."""
        from nxd_jax.inspect.report import Report

        return Report(self, title=title).save(path)

    def dump(self, folder: str | os.PathLike[str] = ".") -> pathlib.Path:
        """Write `MODULE_<hash>/` with graph.txt, stablehlo.mlir and optimized_hlo.txt, as NEURON_FRAMEWORK_DEBUG=1 does; the new folder."""
        lowered = self._subject.lowered
        return dump.write_dump(self._subject.graph, lowered, self._subject.compiled, pathlib.Path(folder))

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def __repr__(self) -> str:
        return str(self)

    def _lines(self) -> list[str]:
        ranks = " x ".join(f"{a} {n}" for a, n in self.axes.items() if n > 1) or "one rank"
        found = [f"{self.name}: {self.graph.title.removeprefix('Graph: ')}, {ranks}, run {self.runs} times"]
        where = "on all cores together" if self._subject.partitioned else "on one core"
        found.append(f"  memory        {self.memory.verdict}")
        found.append(f"  operations    {units.count(self.costs.flops)} FLOP in products, {units.count(self.costs.other)} others, {where}")
        found.append(f"  collectives   {self.collectives.note}")
        for c in collectives.summary(self.collectives)[:8]:
            found.append(
                f"                {c.count} x {c.kind} along {' x '.join(c.axes)} (groups of {c.ranks}), {units.size(c.bytes)} per core"
            )
        if self.compile_seconds:
            found.append(f"  compiled in   {self.compile_seconds:.2f} s")
        if self.others:
            found.append(f"  also          {units.many(len(self.others), 'smaller program')} in the same step (.others)")
        found.append("  see           .graph .stablehlo .optimized .collectives .memory .costs; .save(path) writes JSON")
        return found

    def _repr_html_(self) -> str:
        head, *rest = self._lines()
        body = "".join(f"<div>{markup.escape(line.strip())}</div>" for line in rest[:-1])
        parts = [self.memory.table().html(), self.costs.by("module", depth=2, most=12).html(), self.collectives[:12].html()]
        sections = "".join(f'<div style="margin-top:10px">{p}</div>' for p in parts)
        return f'<div style="font:13px/1.5 system-ui,sans-serif"><b>{markup.escape(head)}</b>{body}{sections}</div>'


def _kinds(axes: dict[str, int]) -> dict[str, tuple[str, ...]]:
    """The mesh axes along which the groups of each kind lie. Expert parallelism divides the axis dp, or within context parallelism cp."""
    names = list(axes)
    if "ep" not in axes:
        return {axis: (axis,) for axis in names if axis in KINDS}
    if names.index("ep") < names.index("cp"):
        experts = {"dp": ("dp", "ep"), "cp": ("cp",), "ep": ("ep", "cp"), "edp": ("dp",)}
    else:
        experts = {"dp": ("dp",), "cp": ("cp", "ep"), "ep": ("ep",), "edp": ("dp", "cp")}
    return {"pp": ("pp",), **experts, "tp": ("tp",)}


def machine(topology: Topology | None = None) -> Topology:
    """A machine that holds the ranks: the one given (default: that of the environment), more nodes of it, or the largest of its family if it has one chip."""
    found = topology or Topology.from_environment()
    ranks = len(spmd.devices()) or world.size()
    if ranks <= found.core_count:
        return found
    name = found.instance.name if found.instance.chips > 1 else _LARGEST.get(found.platform_target, found.instance.name)
    whole = Topology(name, lnc=found.lnc)
    return whole if ranks <= whole.core_count else Topology(name, nodes=-(-ranks // whole.core_count), lnc=found.lnc)


_LARGEST = {"trn1": "trn1.32xlarge", "trn2": "trn2.48xlarge", "inf2": "inf2.48xlarge"}
