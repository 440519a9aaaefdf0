"""Abstract runs of pipelines: memory and collectives of every stage are what arithmetic says, whatever the schedule, on more cores than there are."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch_xla

import nxd_jax
from nxd_jax import inspect
from nxd_jax.abstract import AbstractReport, AbstractValueError
from nxd_jax.inspect.pipeline_inspection import PipelineInspection
from nxd_jax.pipeline.schedules import Kind
from tests.nxd_jax.pipeline.models import HIDDEN, WORDS, Layout

ROWS, TOKENS = 64, 16
A = ROWS * TOKENS * HIDDEN * 4
"""Bytes of a micro-batch's hidden states."""
BLOCK = 4 * (HIDDEN + HIDDEN + 2 * (2 * HIDDEN * HIDDEN // 2))
"""Bytes of a block's weights on one of two tensor-parallel ranks: a norm, two matrices."""
TABLE = 4 * WORDS * HIDDEN


def step(layout: Layout, steps: int = 1) -> tuple[AbstractReport, PipelineInspection]:
    """A training step of a pipeline, on shapes alone."""
    with nxd_jax.abstract_run(layout.ranks) as run:
        model, optimizer = layout.make()
        for _ in range(steps):
            ids = torch.zeros(ROWS * layout.microbatches, TOKENS, dtype=torch.int64)
            loss = model.run_train(ids=ids, labels=ids)
            optimizer.step()
            optimizer.zero_grad()
            torch_xla.sync()
        assert loss.shape == ()
        looked = inspect.look(run)
        assert isinstance(looked, PipelineInspection)
        report = run.report()
        _ = looked.collectives, looked.ranks, looked.programs
    return report, looked


CHECKPOINTED = Layout(96, 4, 6, tp=2, zero1=True, checkpoint=True)  # dp 12: more cores than JAX has devices here


@pytest.fixture(scope="module")
def one_f_one_b() -> tuple[AbstractReport, PipelineInspection]:
    return step(CHECKPOINTED)


def test_memory_of_stages(one_f_one_b: tuple[AbstractReport, PipelineInspection]) -> None:
    """What stays is what the layers of a stage take; activations are the inputs of its blocks, for as many micro-batches as 1F1B keeps."""
    report, _ = one_f_one_b
    assert report.pipeline is not None and report.cores == 96
    first, second, third, last = report.pipeline.ranks
    layers = 2 * BLOCK
    assert second.stays["parameter"] == third.stays["parameter"] == layers
    assert first.stays["parameter"] == last.stays["parameter"] == layers + TABLE
    for memory in (first, second, third, last):
        kinds = memory.kinds()
        assert sum(kinds.values()) == memory.peak
        assert kinds["gradient"] == kinds["parameter"]
        assert 2 * kinds["master weight"] == kinds["optimizer state"]
        assert memory.task == "backward" and memory.stages == (memory.rank,)
    assert second.stays["master weight"] == 2 * 4 * (1 + 1 + HIDDEN + HIDDEN)  # the rows of each weight, cut among 12 ranks
    assert second.kinds()["activations"] - third.kinds()["activations"] == 2 * A  # one more micro-batch
    assert second.kinds()["activations"] >= 3 * 2 * A
    assert report.peak == max(memory.peak for memory in report.pipeline.ranks)
    assert report.kinds["parameter"] == layers + TABLE


def test_gpipe_keeps_every_micro_batch(one_f_one_b: tuple[AbstractReport, PipelineInspection]) -> None:
    report, _ = step(replace(CHECKPOINTED, schedule="gpipe"))
    assert report.pipeline is not None and one_f_one_b[0].pipeline is not None
    for rank, kept in ((1, 3), (2, 2)):  # of 6
        more = report.pipeline.ranks[rank].kinds()["activations"] - one_f_one_b[0].pipeline.ranks[rank].kinds()["activations"]
        assert abs(more - (6 - kept) * 2 * A) <= A, rank  # a result may wait for the next stage then


def test_programs_of_equal_stages_are_said_once(one_f_one_b: tuple[AbstractReport, PipelineInspection]) -> None:
    _, looked = one_f_one_b
    middle = [row for row in looked.programs if row.ranks == "1-2"]
    assert {(row.task, row.runs) for row in middle} >= {("forward", 6), ("backward", 1), ("backward", 5)}
    forward = next(row for row in middle if row.task == "forward")
    assert forward.flops == 2 * 2 * (ROWS * TOKENS) * (2 * HIDDEN * HIDDEN // 2) * 2  # two layers, two products
    assert len({p.structure for p in looked._pieces}) < len({id(p.program) for p in looked._pieces})


def test_collectives_by_stage(one_f_one_b: tuple[AbstractReport, PipelineInspection]) -> None:
    _, looked = one_f_one_b
    found = looked.collectives

    def total(rank: int, kind: str, axis: str) -> tuple[int, int]:
        rows = [c for c in found.where(kind=kind, axes=(axis,)) if str(rank) in _ranks(c.stage)]
        return sum(c.count for c in rows), sum(c.bytes for c in rows)

    assert total(1, "all-reduce", "tp")[0] == 6 * 2 * 2 + 1  # of each block forward and backward; and of the norm of the gradients
    assert total(0, "permute", "pp") == total(3, "permute", "pp") == (6, 6 * A)
    assert total(1, "permute", "pp") == (12, 12 * A)
    assert total(2, "reduce-scatter", "dp")[1] >= 2 * BLOCK
    assert {c.line for c in found.where(kind="permute")} == {"to the next rank", "to the rank before"}
    text = str(looked)
    for part in ("rank 1-2\n", "12 x permute along pp (groups of 2)", "Memory of a core of each pipeline rank", "Programs of a step"):
        assert part in text, part


def _ranks(label: str) -> set[str]:
    """The ranks of a row: "0, 2-3"."""
    ends = [part.split("-") for part in label.split(", ")] if label[0].isdigit() else []
    return {str(n) for part in ends for n in range(int(part[0]), int(part[-1]) + 1)}


def test_traffic_goes_between_stages_too(one_f_one_b: tuple[AbstractReport, PipelineInspection]) -> None:
    report, _ = one_f_one_b
    layout = Layout(32, 4, 4, tp=2, checkpoint=True)
    with nxd_jax.abstract_run(instance="trn1.32xlarge") as run:
        model, _ = layout.make()
        ids = torch.zeros(ROWS * 4, TOKENS, dtype=torch.int64)
        model.run_train(ids=ids, labels=ids)
        looked = inspect.look(run)
        messages = list(looked._messages())  # type: ignore[attr-defined]
        assert len(messages) == 6 * 8 and {size for _, _, size in messages} == {4.0 * A}
        assert all(abs(a - b) == 8 for a, b, _ in messages)  # to the same place of the stage beside
        assert looked.traffic.links
    assert report.fits


def test_the_report_as_text(one_f_one_b: tuple[AbstractReport, PipelineInspection]) -> None:
    text = str(one_f_one_b[0])
    assert text.startswith("96 cores (pp 4 x dp 12 x tp 2), each")
    for part in (
        "a step of the pipeline (1f1b, 4 stages, 6 micro-batches)",
        "activations are the arrays of the run, counted",
        "Collectives of a step: most are those of a core of rank",
        "different programs\n",
        "all together\n",
    ):
        assert part in text, part
    assert text.count("\n1-2           backward") == 2


def test_a_second_step_changes_nothing(one_f_one_b: tuple[AbstractReport, PipelineInspection]) -> None:
    """The first step runs before there is any state of the optimizer, and counts it all the same."""
    report, _ = step(CHECKPOINTED, steps=2)
    assert report.pipeline is not None and one_f_one_b[0].pipeline is not None
    for before, after in zip(one_f_one_b[0].pipeline.ranks, report.pipeline.ranks, strict=True):
        kept, others = (dict(memory.kinds()) for memory in (before, after))
        assert abs(kept.pop("activations") - others.pop("activations")) < 64  # the loss of the step before
        assert kept == others


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize(
    "layout",
    [
        Layout(8, 2, 4, "zbv", stages=2, tp=2, zero1=True),
        Layout(8, 4, 4, "zb_h1", tp=2, tied=True),
        Layout(8, 2, 4, stages=2, tp=2, skip=True, checkpoint=True),
    ],
    ids=str,
)
def test_schedules(layout: Layout) -> None:
    """Every schedule: all of the model is there, and the tasks of all stages are."""
    report, looked = step(layout)
    assert report.pipeline is not None
    parameters = sum(memory.stays["parameter"] for memory in report.pipeline.ranks)
    assert parameters == 8 * BLOCK + (1 if layout.tied else 2) * TABLE
    stages = layout.pp * layout.stages
    forward = {p.task.stage: p.runs for p in looked._pieces if p.task is not None and p.kind is Kind.FORWARD and p.rank is not None}
    assert forward.keys() == set(range(stages))
    assert {memory.stages for memory in report.pipeline.ranks} == {looked._plan.stages_of(rank) for rank in range(layout.pp)}


def test_the_loss_has_no_value() -> None:
    with nxd_jax.abstract_run(4):
        model, _ = Layout(4, 2, 2, tp=2).make()
        ids = torch.zeros(4, TOKENS, dtype=torch.int64)
        loss: Any = model.run_train(ids=ids, labels=ids)
        with pytest.raises(AbstractValueError, match=r"float32\[\]\) is asked for at .*test_pipeline.py:\d+"):
            loss.item()


def test_arrays_are_counted_while_somebody_has_them() -> None:
    with nxd_jax.abstract_run(4) as run:
        live = run.recorded_run().live
        before = sum(live.of_mesh.values())
        x = torch.empty(512, 512, device="meta").to("xla")
        torch_xla.sync()
        assert sum(live.of_mesh.values()) - before == 4 * 512 * 512
        assert len(x._storage.held.addressable_shards) == 4  # type: ignore[attr-defined]  # what each core has is no array of its own
        y = x + 1
        torch_xla.sync()
        assert sum(live.of_mesh.values()) - before == 2 * 4 * 512 * 512
        del x, y
        assert sum(live.of_mesh.values()) == before
