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
    assert "\nA step takes 45, of which ranks are idle 20.0%.\n\nrank 0 " in text


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


def test_times_of_each_stage() -> None:
    found = inspect.schedule("1f1b", stages=2, microbatches=1, times=[Times(1, 1, 1), Times(10, 10, 10)])
    assert found.timeline.end == 33
    with pytest.raises(ScheduleError, match="times has 3 entries, and the schedule 1f1b has 2 stages: give one for each, or one for all"):
        inspect.schedule("1f1b", stages=2, microbatches=1, times=[Times()] * 3)


# -- as text ----------------------------------------------------------------------------------------------


def test_text() -> None:
    assert inspect.schedule("1f1b", stages=2, microbatches=2).text(80).splitlines() == [
        "rank 0 F0 F1 ······B0 -- ···B1 --",
        "rank 1 ···F0 B0 -- F1 B1 -- ······",
        "F forward, B backward, · idle",
    ]
    assert inspect.schedule("zbv", stages=4, microbatches=2).text(200).splitlines() == [
        "rank 0 F0 F1 ···f0 i0 w0 f1 i1 I0 w1 I1 W0 W1",
        "rank 1 ···F0 f0 F1 f1 i0 I0 w0 i1 I1 W0 w1 W1",
        "F forward, I backward of the input, W backward of the weights, lower case: later chunks of a rank, · idle",
    ]


@pytest.mark.parametrize("name", schedules.KINDS)
def test_text_is_no_wider_than_asked(name: str) -> None:
    """And has letters alone then, each as often as its computations take."""
    found = inspect.schedule(name, stages=8, microbatches=32)
    for width in (60, 200, 2000):
        *lanes, _ = found.text(width).splitlines()
        assert len(lanes) == found.timeline.schedule.ranks and max(map(len, lanes)) <= width
    *lanes, _ = found.text(7 + round(found.timeline.end)).splitlines()
    assert [len(lane) - 7 - lane.count("·") for lane in lanes] == [row.busy for row in found]


# -- as a picture -----------------------------------------------------------------------------------------


def boxes(axes: Any, name: str) -> list[tuple[float, float]]:
    """(start, length) of the boxes in the collections of this name."""
    found = []
    for collection in axes.collections:
        if (collection.get_gid() or "").startswith(name):
            for path in collection.get_paths():
                x = path.vertices[:, 0]
                found.append((float(x.min()), float(x.max() - x.min())))
    return sorted(found)


@pytest.mark.parametrize(("name", "colours"), [("1f1b", 2), ("zb_h1", 3), ("dualpipev", 4)])
def test_picture(name: str, colours: int, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    found = inspect.schedule(name, stages=4, microbatches=8)
    made = found.picture(tmp_path / "made" / "step.png")
    assert (tmp_path / "made" / "step.png").stat().st_size > 5000
    lanes, kept = made.axes
    for rank, tasks in enumerate(found.timeline.tasks):
        assert boxes(lanes, f"rank {rank} ") == sorted((task.start, task.end - task.start) for task in tasks)
        assert sum(length for _, length in boxes(lanes, f"idle {rank}")) == pytest.approx(found[rank].idle)
    numbers = [text.get_text() for text in lanes.texts if text.get_gid() is None]
    assert sorted(map(int, numbers)) == sorted(task.action.microbatch for tasks in found.timeline.tasks for task in tasks)
    assert [text.get_text() for text in lanes.texts if text.get_gid()] == [f"{row.idle / found.timeline.end:.1%} idle" for row in found]
    assert [text.get_text() for text in kept.texts] == [str(row.peak) for row in found]
    (legend,) = made.legends
    assert len(legend.get_texts()) == colours + 1 + (name == "dualpipev")


def test_pictures_on_one_scale() -> None:
    pytest.importorskip("matplotlib")
    found = inspect.schedule("gpipe", stages=2, microbatches=2)
    assert found.picture(until=20).axes[0].get_xlim() == (0, 20)
    with pytest.raises(ValueError, match="until=5 is before the end of the step, 9: give that or more"):
        found.picture(until=5)


def test_picture_of_many_boxes_has_numbers_where_they_fit() -> None:
    pytest.importorskip("matplotlib")
    texts = inspect.schedule("1f1b", stages=16, microbatches=64).picture().axes[0].texts
    numbers = [text for text in texts if text.get_gid() is None]
    assert 16 * 64 <= len(numbers) < 2 * 16 * 64  # backward passes, which are longer, and the first forward passes
    assert len(inspect.schedule("gpipe", stages=8, microbatches=512).picture().axes[0].texts) == 8


def test_picture_of_another_kind() -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(ValueError, match=r"\.txt"):
        inspect.schedule("gpipe", stages=2, microbatches=2).picture("step.txt")
