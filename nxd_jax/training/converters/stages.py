"""Which pipeline rank has which tensor."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence

from nxd_jax.checkpoint import joining
from nxd_jax.checkpoint.stage_rules import Pipeline
from nxd_jax.pipeline.partition import even_sizes
from nxd_jax.training.converters.entries import FIRST, LAST, Plan
from nxd_jax.training.converters.sizes import Layout


def pipeline(plan: Plan, layers: int, layout: Layout, aliases: Sequence[str] = ()) -> Pipeline:
    """The pipeline to write a plan's tensors for, stages as NxD cuts them. aliases: further names, which go to the last stage."""
    if layout.stages == 1:
        return Pipeline()
    stage_of = [stage for stage, size in enumerate(sizes(layers, layout)) for _ in range(size)]
    rules = [(re.compile(re.escape(name)), LAST) for name in aliases]
    for e in plan.entries:
        stage = e.stage if e.stage in (FIRST, LAST) else str(stage_of[int(e.stage)])
        fused = joining.fused_name(e.ours)
        names = [e.ours] if fused is None else [e.ours, fused[0]]
        rules += [(re.compile(re.escape(name)), str(stage)) for name in names]
    return Pipeline(layout.pp, layout.vpp, rules)


def sizes(layers: int, layout: Layout) -> list[int]:
    """Layers of each stage: between the cuts of a YAML file (`model.pipeline_cuts`), else shared out evenly. Raises ValueError for cuts that cannot be."""
    if not layout.cuts:
        return even_sizes(layers, layout.stages)
    ends = [_number(cut) + 1 for cut in layout.cuts]
    if len(ends) != layout.stages - 1 or ends != sorted(set(ends)) or ends[-1] >= layers:
        raise ValueError(
            f"model.pipeline_cuts: {', '.join(layout.cuts)} must be the last layers of all {layout.stages} stages but the last one, in order, below layer "
            f"{layers - 1}"
        )
    return [end - start for start, end in itertools.pairwise([0, *ends, layers])]


def _number(cut: str) -> int:
    found = cut.rpartition(".")[2]
    if not found.isdigit():
        raise ValueError(f"model.pipeline_cuts: {cut!r} is no name of a layer, such as model.layers.17")
    return int(found)
