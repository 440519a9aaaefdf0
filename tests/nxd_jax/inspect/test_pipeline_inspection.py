"""`look` at a pipeline's step that really ran: the same stages, memory and collectives as on shapes alone; an estimate with the schedule's idle time."""

from __future__ import annotations

import json
import pathlib
from dataclasses import replace

import pytest
import torch
import torch_xla

import nxd_jax
from nxd_jax import inspect
from nxd_jax.inspect import stage_times, stages
from nxd_jax.inspect.estimate import estimate
from nxd_jax.inspect.pipeline_inspection import PipelineInspection
from nxd_jax.pipeline import step_log
from nxd_jax.topology import Topology
from tests.nxd_jax.conftest import Nxd
from tests.nxd_jax.inspect.pages import read_html
from tests.nxd_jax.pipeline.models import Layout
from torch_bridge.runtime import session

TRN1 = Topology("trn1.32xlarge")
LAYOUT = Layout(8, 4, 4, tp=2, checkpoint=True)
PACKING = 16 << 10
"""Bytes by which XLA's plans for one program may differ, if its inputs come in another order."""


def step(layout: Layout, rows: int = 16) -> None:
    model, optimizer = layout.make()
    ids = torch.zeros(rows * layout.microbatches, 16, dtype=torch.int64)
    model.run_train(ids=ids, labels=ids)
    optimizer.step()
    optimizer.zero_grad()
    torch_xla.sync()
    global KEPT
    KEPT = model, optimizer


KEPT: object = None
"""The model and the optimizer of the last step: whose tensors are is found out from what is alive."""


def looked(layout: Layout, real: bool = False) -> PipelineInspection:
    """A step, with everything worked out that needs the ranks."""
    if real:
        step(layout)
        return _worked_out(inspect.look())
    with nxd_jax.abstract_run(layout.ranks) as run:
        step(layout)
        return _worked_out(inspect.look(run))


def _worked_out(found: object) -> PipelineInspection:
    assert isinstance(found, PipelineInspection)
    _ = found.ranks, found.programs, found.collectives, found.costs, str(found), found.estimate(TRN1)
    return found


def test_a_real_run_shows_what_shapes_do(nxd: Nxd, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also behind a step that never ended, whose log still listens.

    The real run adds gradients of the last stage in another order than an abstract one, and XLA packs the temporaries of this small program (36 KB) otherwise.
    """
    monkeypatch.setenv("NXD_JAX_FOLD", "12")  # else an abstract run leaves the graphs as they are recorded, without what looks for loops
    step_log.LOG._listen(session.current())
    shapes = looked(LAYOUT)
    nxd(8)
    real = looked(LAYOUT, real=True)
    assert real.name == shapes.name == "a step of the pipeline (1f1b, 4 stages, 4 micro-batches)"
    assert real.axes == {"pp": 4, "dp": 1, "cp": 1, "tp": 2}
    inside, planned = ([row for row in step.programs if row.task != "outside"] for step in (real, shapes))
    said = [(row.ranks, row.task, row.runs, row.arguments, row.results, row.flops) for row in inside]
    assert said == [(row.ranks, row.task, row.runs, row.arguments, row.results, row.flops) for row in planned]
    assert [row.temporaries for row in inside] == pytest.approx([row.temporaries for row in planned], rel=0.02, abs=PACKING)
    assert ("1-2", "backward", 3) in {row[:3] for row in said}
    assert _sent(real) == _sent(shapes)
    for one, other in zip(real.ranks, shapes.ranks, strict=True):
        assert one.stays == other.stays
        assert abs(one.peak - other.peak) < 0.1 * other.peak + PACKING, (one.rank, one.kinds(), other.kinds())
    assert "activations follow from the schedule" in str(real.stages)
    assert real.estimate(TRN1).seconds == pytest.approx(shapes.estimate(TRN1).seconds, rel=0.02)
    page = read_html(real.report(tmp_path / "report.html").read_text())
    for part in ("Memory of a core of each pipeline rank", "Programs of a step", "Collectives of a step", "pipeline bubble"):
        assert part in page.text, part
    assert "could not be worked out" not in page.text
    assert real.memory_picture(tmp_path / "memory.png").axes
    data = json.loads(real.save(tmp_path / "step.json").read_text())
    assert [row["ranks"] for row in data["stages"]] and data["programs"][0]["ops"]
    assert "Programs of a step" in real._repr_html_()


def _sent(step: PipelineInspection) -> dict[tuple[str, str, tuple[str, ...]], tuple[int, int]]:
    """Count and bytes of each rank's collectives within the passes, wherever in the model they come from."""
    sums: dict[tuple[str, str, tuple[str, ...]], tuple[int, int]] = {}
    for c in step.collectives.where(lambda c: c.phase != "outside"):
        for rank in stages._numbers(c.stage):
            count, size = sums.get((rank, c.kind, c.axes), (0, 0))
            sums[rank, c.kind, c.axes] = count + c.count, size + c.bytes
    return sums


def test_one_micro_batch_waits_for_all_stages() -> None:
    """With one micro-batch no two ranks compute at the same time: a step takes as long as all computations together, and what is sent."""
    found = looked(replace(LAYOUT, microbatches=1))
    said = found.estimate(TRN1)
    once = sum(t.seconds for t in said.terms if t.once)
    passes = [p for p in found._pieces if p.task is not None]
    seconds = sum(p.runs * p.inspection.estimate(TRN1).seconds for p in passes)
    bubble = next(t.seconds for t in said.terms if t.name == "pipeline bubble")
    message = seconds_of_a_message(found)
    assert said.seconds - once == pytest.approx(seconds + 6 * message, rel=1e-6)
    assert bubble > 2 * (said.seconds - once - bubble)  # three of four ranks wait


def seconds_of_a_message(found: PipelineInspection) -> float:
    return stage_times._transfer(found._log, lambda work: estimate(work, TRN1, groups=found.groups).seconds, found.axes)


def test_idle_time_is_the_schedules() -> None:
    def share(layout: Layout) -> float:
        said = looked(layout).estimate(TRN1)
        passes = sum(t.seconds for t in said.terms if not t.once)
        return next(t.seconds for t in said.terms if t.name == "pipeline bubble") / passes

    eight = share(replace(LAYOUT, microbatches=8))
    assert share(replace(LAYOUT, microbatches=4)) > 1.3 * eight
    assert eight == pytest.approx(3 / 11, abs=0.08)  # (P - 1) / (M + P - 1)
    assert share(replace(LAYOUT, microbatches=8, schedule="zb_h1")) < eight


def test_ranks_as_people_write_them() -> None:
    assert stages.spans([3, 0, 1, 7]) == "0-1, 3, 7"
    assert stages.label([None]) == "all together" and stages.label([2, None]) == "2"
    assert stages._numbers("0, 2-4") == ["0", "2", "3", "4"] and stages._numbers("all together") == ["all together"]


def test_a_step_without_a_pipeline_afterwards(nxd: Nxd) -> None:
    nxd(8)
    step(LAYOUT)
    assert isinstance(inspect.look(), PipelineInspection)
    nxd(1)
    x = torch.ones(3, 3, device="xla")
    (x @ x).exp()
    torch_xla.sync()
    (x @ x).exp().sum().item()
    assert not isinstance(inspect.look(), PipelineInspection)
