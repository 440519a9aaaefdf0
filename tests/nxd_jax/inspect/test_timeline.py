"""`inspect.pipeline` measures a step: ranks keep as many arrays as the schedule says, and the timeline is what durations make of it."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest
import torch
from torch import nn

import nxd_jax
from nxd_jax import inspect
from nxd_jax.inspect import timeline
from nxd_jax.inspect.report import Report
from nxd_jax.inspect.watching import Stopped, Watch
from nxd_jax.pipeline import observers, schedules
from nxd_jax.pipeline.schedules import KINDS, Action
from tests.nxd_jax.conftest import Nxd
from tests.nxd_jax.pipeline.models import Layout
from torch_bridge.runtime import session

STEPS = [
    *(
        Layout(ranks, ranks, 2 * ranks, name, stages=kind.chunks, layers=ranks * kind.chunks)
        for ranks in (2, 4)
        for name, kind in KINDS.items()
    ),
    Layout(4, 2, 6, "interleaved", stages=3, tp=2),
    Layout(4, 4, 3, "1f1b"),
    Layout(4, 2, 4, "zbv", stages=2, tp=2, checkpoint=True, tied=True),
]


def formula(layout: Layout, rank: int) -> int:
    """Most activations of a rank, by the table of docs/reference/schedules.md."""
    p, v, m = layout.pp, layout.stages, layout.microbatches
    return {
        "gpipe": m,
        "1f1b": min(p - rank, m),
        "looped_bfs": v * m,
        "interleaved": min((v - 1) * p + 2 * (p - 1 - rank) + 1, v * m),
        "zb_h1": p,
        "interleaved_zero_bubble": v * p,
        "zbv": 2 * p,
        "dualpipev": 2 * p + 1 if m > p else 0,
    }[layout.schedule or "1f1b"]


def made(nxd: Nxd, layout: Layout) -> tuple[Any, dict[str, torch.Tensor]]:
    """A model and a batch for it."""
    nxd(layout.ranks, tp=layout.tp, pp=layout.pp)
    model, _ = layout.make()
    return model, layout.local(layout.batch())


def measured(model: Any, batch: dict[str, torch.Tensor]) -> inspect.PipelineStep:
    """The second step: nothing is compiled in it."""
    model.run_train(**batch)
    for p in model.parameters():
        p.grad = None
    with inspect.pipeline(model) as step:
        model.run_train(**batch)
    return step


WHOLE, PARTS = STEPS[9], STEPS[14]
"""Backward passes that are whole, and those in two parts, of stages in a V."""
OTHERS = [layout for layout in STEPS if layout not in (WHOLE, PARTS)]


@pytest.mark.thorough(keep=2)  # the first and the one in the middle
@pytest.mark.core(keep=1)
@pytest.mark.parametrize("layout", [WHOLE, *OTHERS[:8], PARTS, *OTHERS[8:]], ids=str)
def test_as_many_activations_are_kept_as_the_schedule_says(nxd: Nxd, monkeypatch: pytest.MonkeyPatch, layout: Layout) -> None:
    """Every micro-batch keeps the same arrays, as none of them is played."""
    monkeypatch.setenv("NXD_JAX_REPLAY", "0")
    step = measured(*made(nxd, layout))
    expected = [formula(layout, rank) for rank in range(layout.pp)]
    assert [row.peak for row in step.ranks] == expected
    assert [row.planned_peak for row in step.ranks] == [
        step.schedule and inspect.schedule(step.schedule)[rank].peak for rank in range(layout.pp)
    ]
    assert not step.measured.compiled and {task.action for tasks in step.timeline.tasks for task in tasks} == set(step.measured.seconds)
    for row in step.ranks:
        assert row.peak_bytes >= row.held_bytes + row.activation_bytes - _freed(step, row.rank)
        assert row.activation_bytes >= row.peak * min(step.stages[stage].activation_bytes for stage in row.stages)


def test_as_many_are_kept_of_played_stages(nxd: Nxd) -> None:
    """Fewer bytes, perhaps."""
    step = measured(*made(nxd, WHOLE))
    assert [row.peak for row in step.ranks] == [formula(WHOLE, rank) for rank in range(WHOLE.pp)]


def _freed(step: inspect.PipelineStep, rank: int) -> int:
    """Bytes that were there before the step and went in it: gradients that were added to."""
    return sum(size for kept in step.measured.arrays if kept.born < 0 and kept.died is not None for at, size in kept.sizes if at == rank)


def test_every_schedule_is_among_them() -> None:
    assert {(layout.pp, layout.schedule) for layout in STEPS} >= {(ranks, name) for ranks in (2, 4) for name in KINDS}


def test_a_rank_that_lets_go_of_nothing_is_found_out(nxd: Nxd) -> None:
    """A hook keeps what every layer returns."""
    model, batch = made(nxd, Layout(2, 2, 6))
    found: list[torch.Tensor] = []
    for layer in model.original_module().layers:
        layer.register_forward_hook(lambda module, args, out: found.append(out.detach()))
    step = measured(model, batch)
    assert found and [(row.peak, row.planned_peak) for row in step.ranks] == [(6, 2), (6, 1)]


def test_numbers_are_those_of_a_step_that_is_not_measured(nxd: Nxd) -> None:
    model, batch = made(nxd, Layout(2, 2, 4, "zb_h1"))
    alone = model.run_train(**batch)
    wanted = {name: p.grad.cpu() for name, p in model.named_parameters()}
    for p in model.parameters():
        p.grad = None
    with inspect.pipeline(model):
        loss = model.run_train(**batch)
    assert float(loss) == float(alone)
    for name, p in model.named_parameters():
        assert torch.equal(p.grad.cpu(), wanted[name]), name


class Ready(observers.StepObserver):
    """Notes whether all results are there when an action starts."""

    def __init__(self) -> None:
        self.found: list[bool] = []

    def action(self, action: Action) -> contextlib.AbstractContextManager[Any]:
        self.found.append(all(array.is_ready() for array in jax.live_arrays()))
        return contextlib.nullcontext()


def test_each_computation_is_waited_for(nxd: Nxd) -> None:
    model, batch = made(nxd, Layout(2, 2, 2))
    model.run_train(**batch)
    ready = Ready()
    observers.observe(ready)
    try:
        with inspect.pipeline(model) as step:
            model.run_train(**batch)
    finally:
        observers.unobserve(ready)
    assert ready.found == [True] * 8
    assert all(seconds > 0 for seconds in (*step.measured.seconds.values(), *step.measured.host_seconds.values()))


@pytest.mark.thorough(keep=2)
@pytest.mark.core(keep=0)
@pytest.mark.parametrize("ranks", [4, 2])
@pytest.mark.parametrize("name", ["1f1b", "gpipe", "zb_h1", "interleaved", "zbv"])
def test_the_timeline_is_what_durations_make_of_it(nxd: Nxd, name: str, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With equal durations ranks are as idle as the formula says; with a stage that takes twice as long they are more idle than planned."""
    model, batch = made(nxd, Layout(ranks, ranks, 4 * ranks, name, stages=KINDS[name].chunks))
    step = measured(model, batch)
    one = {action: 2.0 if action.kind is schedules.Kind.BACKWARD else 1.0 for action in step.measured.seconds}
    monkeypatch.setattr(step.measured, "seconds", one)
    step.take(step.measured)
    parts = KINDS[name].chunks
    idle = (ranks - 1) * (1 if "zb" in name else 3)
    assert step.idle_share == pytest.approx(idle / (12 * ranks * parts + idle)) == step.plan.idle_share
    assert step.seconds == 12 * ranks * parts + idle
    monkeypatch.setattr(step.measured, "seconds", {action: own * (1 + (action.stage == 1)) for action, own in one.items()})
    step.take(step.measured)
    assert step.idle_share > step.plan.idle_share == pytest.approx(idle / (12 * ranks * parts + idle))
    assert step.times[1].forward == 2 * step.times[0].forward == 2
    assert inspect.schedule(step.measured.schedule, times=step.times).timeline.end == step.seconds


def test_what_is_shown(nxd: Nxd, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    model, batch = made(nxd, Layout(2, 2, 4, "zb_h1"))
    step = measured(model, batch)
    text = str(step)
    assert text.startswith("Step of a pipeline by zb_h1: 2 stages on 2 ranks, 4 micro-batches\n")
    for said in (
        "most activations",
        "if all stages took the same",
        "Measured: ",
        "Simulated: ",
        "rank 0 F",
        "I backward of the input",
        "· idle",
    ):
        assert said in text
    assert "compiled in this step" not in text
    assert [row.stage for row in step.stages] == [0, 1] and "weight backward" in str(step.stages) and "  backward  " not in str(step.stages)
    assert len(step.tasks) == 2 * 4 * 3 and step.tasks[0].kind == "F" and step.tasks[0].start == 0
    assert max(row.end for row in step.tasks) == step.seconds
    assert set(step.data()) == {"schedule", "seconds", "idle_share", "planned_idle_share", "ranks", "stages", "tasks"}
    assert step._repr_html_().count("<table") == 2
    picture = step.picture(tmp_path / "step.png", until=2 * step.seconds)
    assert (tmp_path / "step.png").stat().st_size > 5000
    assert f"{step.idle_share:.1%} idle ({step.plan.idle_share:.1%} with equal stages)" in picture.axes[0].get_title(loc="left")
    assert [mark.get_text() for mark in step.picture(count=True).axes[1].texts] == ["2", "2"]


def test_the_first_step_says_that_it_compiled(nxd: Nxd) -> None:
    model, batch = made(nxd, Layout(2, 2, 2))
    with inspect.pipeline(model) as step:
        model.run_train(**batch)
    assert step.measured.compiled > 0 and "compiled in this step: measure another one." in str(step)


def test_of_several_steps_the_least_time_of_each_computation_counts(nxd: Nxd, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NXD_JAX_REPLAY", "0")
    model, batch = made(nxd, Layout(2, 2, 2))
    short = {name: t[:, :2] for name, t in batch.items()}
    with inspect.pipeline(model) as step:
        found = []
        for given in (batch, batch, batch, short, short, short, batch):
            for p in model.parameters():
                p.grad = None
            model.run_train(**given)
            found.append(step.measured)
    assert [one.steps for one in found] == [1, 1, 2, 1, 1, 2, 1]
    assert [bool(one.compiled) for one in found] == [True, False, False, True, False, False, False]
    _, one, two, *_ = found
    assert all(two.seconds[action] <= taken for action, taken in one.seconds.items())
    assert all(two.host_seconds[action] <= taken for action, taken in one.host_seconds.items())
    step.take(found[6])
    assert "(the least of 2 steps)" in str(step)


def _watching() -> bool:
    """Whether anything of a block is left behind."""
    return any(isinstance(one, (timeline.Watch, timeline.Clock)) for one in (*observers._OBSERVERS, *session.current().observers))


def test_the_last_step_of_that_model_counts(nxd: Nxd) -> None:
    model, batch = made(nxd, Layout(2, 2, 2))
    other, _ = Layout(2, 2, 2, "gpipe").make()
    with inspect.pipeline(model) as step, inspect.pipeline() as every:
        assert not step.done and repr(step) == "no step of a pipeline has been measured yet"
        model.run_train(**batch)
        first = step.measured
        model.run_train(**batch)
        assert step.measured is not first
        other.run_train(**batch)
    assert step.measured.schedule.name == "1f1b" and every.measured.schedule.name == "gpipe"
    assert not _watching() and gc.isenabled()
    before = step.measured
    model.run_train(**batch)
    assert step.measured is before


def test_a_step_that_raises_leaves_nothing(nxd: Nxd) -> None:
    model, batch = made(nxd, Layout(2, 2, 2))

    def broken(module: nn.Module, args: Any) -> None:
        raise RuntimeError("in the layer")

    hook = model.original_module().layers[-1].register_forward_pre_hook(broken)
    with inspect.pipeline(model) as step:
        with pytest.raises(RuntimeError, match="in the layer"):
            model.run_train(**batch)
        assert gc.isenabled()
        with pytest.raises(ValueError, match="no training step of the pipeline has ended in this block: call model.run_train"):
            _ = step.seconds
        hook.remove()
        model.run_train(**batch)
    assert step.seconds > 0


def test_what_cannot_be_measured(nxd: Nxd, monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        pytest.raises(TypeError, match="takes an NxDPPModel, or what initialize_parallel_model makes with .* above 1, got Linear"),
        _open(nn.Linear(2, 2)),
    ):
        pass
    with nxd_jax.abstract_run(), pytest.raises(NotImplementedError, match="an abstract run has none: inspect.schedule"), _open():
        pass
    monkeypatch.setattr(timeline.world, "is_local", lambda: False)
    with pytest.raises(NotImplementedError, match="torchrun has started several processes: start the script with nxd-run"), _open():
        pass


@contextlib.contextmanager
def _open(model: Any = None) -> Iterator[None]:
    with inspect.pipeline(model):
        yield


@pytest.mark.core(keep=1)
@pytest.mark.parametrize("profiled", [0, 1])
def test_the_report_of_a_script_that_trains_a_pipeline(nxd: Nxd, profiled: int) -> None:
    """`nxd-inspect`: steps are counted and measured, but for those that are profiled; the page has them."""
    pytest.importorskip("matplotlib")
    import torch_xla

    model, batch = made(nxd, Layout(2, 2, 2))
    seen = []
    with Watch(3, profiled) as watch, pytest.raises(Stopped):
        for step in range(9):
            model.run_train(**batch)
            for p in model.parameters():
                p.grad = None
            torch_xla.sync()
            seen.append(step)
    assert seen == [0, 1] and not _watching()
    assert watch.pipeline is not None and not watch.pipeline.measured.compiled
    assert watch.inspection is not None and (watch.profile is not None) == bool(profiled)
    page = Report(watch.inspection, pipeline=watch.pipeline).html(0)
    assert '<section id="pipeline">' in page and "Step of a pipeline by 1f1b" in page and "Every computation" in page
    planned = inspect.PipelineStep()
    planned.schedule = watch.pipeline.schedule
    section = Report(watch.inspection, pipeline=planned)._pipeline()
    assert "No step was measured. This is the plan" in section and "Schedule 1f1b: 2 stages" in section
    assert Report(watch.inspection)._pipeline() == ""
