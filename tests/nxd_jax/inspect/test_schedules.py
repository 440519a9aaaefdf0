"""`inspect.schedule`: what a pipeline schedule costs as a table and as a picture, without a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nxd_jax import inspect
from nxd_jax.pipeline import schedules
from nxd_jax.pipeline.schedules import ScheduleError, Times


def test_table() -> None:
    found = inspect.schedule("1f1b", stages=4, microbatches=12)
    assert [(row.rank, row.stages, row.busy, row.idle, row.waiting, row.peak) for row in found] == [
        (0, (0,), 36.0, 9.0, 9.0, 4),
        (1, (1,), 36.0, 9.0, 6.0, 3),
        (2, (2,), 36.0, 9.0, 3.0, 2),
        (3, (3,), 36.0, 9.0, 0.0, 1),
    ]
    text = str(found)
    assert text.startswith("Schedule 1f1b: 4 stages on 4 ranks, 12 micro-batches\n")
    assert text.endswith("A step takes 45, of which ranks are idle 20.0%.")


def test_chunks_and_times() -> None:
    found = inspect.schedule("zbv", stages=8, microbatches=32)
    assert [row.stages for row in found] == [(0, 7), (1, 6), (2, 5), (3, 4)]
    several = inspect.schedule("interleaved", stages=12, microbatches=8, chunks=3, times=Times(forward=0.5, transfer=0.25))
    assert [row.stages for row in several] == [(r, 4 + r, 8 + r) for r in range(4)]
    assert several.timeline.tasks[1][0].start == 0.75


def test_own_schedule() -> None:
    own = schedules.from_orders([["0F0", "0B0"], ["1F0", "1B0"]], name="mine")
    assert inspect.schedule(own).title == "Schedule mine: 2 stages on 2 ranks, 1 micro-batches"
    with pytest.raises(ScheduleError, match="the schedule mine has its own numbers of stages and micro-batches: leave out"):
        inspect.schedule(own, stages=2)
    with pytest.raises(ScheduleError, match="deadlocks: rank 0 is at 0B0"):
        inspect.schedule(schedules.from_orders([["0B0", "0F0"]]))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"which": "1f1b"}, r"say how many stages and micro-batches: schedule\('1f1b', stages=8, microbatches=32\)"),
        ({"which": "zbv", "stages": 7, "microbatches": 8}, "stages=7 is not a multiple of the 2 stages that each rank has"),
        ({"which": "interleaved", "stages": 8, "microbatches": 8, "chunks": 0}, "stages=8 is not a multiple of the 0 stages"),
        ({"which": "zvb", "stages": 8, "microbatches": 8}, r"did you mean 'zbv'\?"),
    ],
)
def test_mistakes(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ScheduleError, match=said):
        inspect.schedule(**arguments)


@pytest.mark.parametrize(("name", "colours"), [("1f1b", 2), ("zb_h1", 3), ("dualpipev", 4)])
def test_picture(name: str, colours: int, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    found = inspect.schedule(name, stages=4, microbatches=8)
    made = found.picture(tmp_path / "made" / "step.png")
    assert (tmp_path / "made" / "step.png").stat().st_size > 5000
    lanes, kept = made.axes
    tasks = [task for rank in found.timeline.tasks for task in rank]
    boxes = sorted((box.get_x(), box.get_width()) for box in lanes.patches)
    assert boxes == sorted((task.start, task.end - task.start) for task in tasks)
    assert sorted(int(text.get_text()) for text in lanes.texts) == sorted(task.action.microbatch for task in tasks)
    assert len(lanes.get_legend().get_texts()) == colours
    assert [max(line.get_ydata()) for line in kept.lines] == [row.peak for row in found]


def test_picture_of_many_boxes_has_no_numbers() -> None:
    pytest.importorskip("matplotlib")
    assert not inspect.schedule("gpipe", stages=8, microbatches=64).picture().axes[0].texts


def test_picture_of_another_kind() -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(ValueError, match=r"\.txt"):
        inspect.schedule("gpipe", stages=2, microbatches=2).picture("step.txt")
