"""Schedules, rank by rank: every step once, in torch's order, with messages that meet."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Callable

import pytest
from neuronx_distributed.pipeline import scheduler
from neuronx_distributed.pipeline.scheduler import (
    BackwardPostprocessTask,
    BackwardPreprocessTask,
    BackwardStepTask,
    ForwardPostprocessTask,
    ForwardPreprocessTask,
    ForwardStepTask,
    InferenceSchedule,
    PipeSchedule,
    ReduceGradsTask,
    Train1F1BSchedule,
    TrainInterleavedSchedule,
    TrainSchedule,
)
from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

import nxd_jax.pipeline.scheduler
from nxd_jax.pipeline.scheduler import PipelineTask
from tests.nxd_jax.pipeline.simulated import computed, flat, peak, short, stuck

TASKS = (
    ForwardPreprocessTask,
    ForwardStepTask,
    ForwardPostprocessTask,
    BackwardPreprocessTask,
    BackwardStepTask,
    BackwardPostprocessTask,
)
NEEDS = {
    ForwardStepTask: (ForwardPreprocessTask,),
    ForwardPostprocessTask: (ForwardStepTask,),
    BackwardPreprocessTask: (ForwardStepTask,),
    BackwardStepTask: (BackwardPreprocessTask, ForwardPostprocessTask, ForwardStepTask),
    BackwardPostprocessTask: (BackwardStepTask,),
}
STAGES = (2, 3, 4, 5, 6, 7, 8)
CHUNKS = (1, 2, 3)


def micro_batches(stages: int) -> range:
    """What the interleaved schedule takes, up to 32."""
    return range(stages, 33, stages)


def one_chunk(count: int, stages: int, kind: type[PipeSchedule] = Train1F1BSchedule) -> list[list[PipelineTask]]:
    return [flat(kind(count, stages, rank)) for rank in range(stages)]


def interleaved(count: int, chunks: int, stages: int, **options: bool) -> list[list[PipelineTask]]:
    return [flat(TrainInterleavedSchedule(count, chunks, stages, rank, **options)) for rank in range(stages)]


def check_tasks(rank: int, tasks: list[PipelineTask], count: int, chunks: int, stages: int) -> None:
    """Each micro-batch has its six tasks in each chunk once, in a sound order; the ends of the model have no neighbour to send to or get from."""
    first, last = (rank, 0), (rank, chunks - 1)
    wanted = {kind(mb, chunk) for kind in TASKS for mb in range(count) for chunk in range(chunks)}
    if first == (0, 0):
        wanted -= {BackwardPostprocessTask(mb, 0) for mb in range(count)}
    if last == (stages - 1, chunks - 1):
        wanted -= {kind(mb, chunks - 1) for kind in (ForwardPostprocessTask, BackwardPreprocessTask) for mb in range(count)}
    assert len(tasks) == len(wanted) + 1 and {*tasks[:-1]} == wanted and tasks[-1] == ReduceGradsTask()
    check_order(tasks)


def check_order(tasks: list[PipelineTask]) -> None:
    """What a task needs comes before it."""
    places = {task: place for place, task in enumerate(tasks)}
    for task in tasks:
        for kind in NEEDS.get(type(task), ()):
            needed = kind(task.mb, task.model_chunk)
            assert places.get(needed, -1) < places[task], f"{task} comes before {needed}"


@pytest.mark.core(keep=3)
@pytest.mark.parametrize("stages", [1, *STAGES, 16])
def test_1f1b(stages: int) -> None:
    """Also with fewer micro-batches than stages."""
    for count in range(1, 33):
        ranks = one_chunk(count, stages)
        assert not stuck(ranks, stages - 1, sends_wait=False) and not stuck(ranks, stages - 1, sends_wait=True)
        for rank, tasks in enumerate(ranks):
            check_tasks(rank, tasks, count, 1, stages)
            schedule = Train1F1BSchedule(count, stages, rank)
            assert schedule.num_warmup_steps == min(stages - rank - 1, count)
            first_backward = [type(task) for task in tasks if type(task) in (ForwardStepTask, BackwardStepTask)].index(BackwardStepTask)
            assert first_backward == min(schedule.num_warmup_steps + 1, count)
            assert len(list(schedule.steps())) == 2 * count + 1 and peak(tasks) == min(stages - rank, count)
            assert tasks == flat(TrainSchedule(count, stages, rank))


@pytest.mark.core(keep=3)
@pytest.mark.parametrize("stages", STAGES)
@pytest.mark.parametrize("chunks", CHUNKS)
def test_interleaved(stages: int, chunks: int) -> None:
    for count in micro_batches(stages):
        for odd_even in (False, True):
            ranks = interleaved(count, chunks, stages, use_odd_even_scheduler=odd_even)
            for sends_wait in (False, True):
                assert not stuck(ranks, stages * chunks - 1, sends_wait=sends_wait)
        for rank, tasks in enumerate(interleaved(count, chunks, stages)):
            check_tasks(rank, tasks, count, chunks, stages)
            schedule, total = TrainInterleavedSchedule(count, chunks, stages, rank), count * chunks
            warmup = total if count == stages else (stages - rank - 1) * 2 + (chunks - 1) * stages
            assert schedule.num_warmup_steps == warmup
            steps = [[type(task) for task in step if type(task) in (ForwardStepTask, BackwardStepTask)] for step in schedule]
            assert steps[:warmup] == [[ForwardStepTask]] * warmup
            assert steps[warmup:total] == [[ForwardStepTask, BackwardStepTask]] * (total - warmup)
            assert steps[total:] == [*[[BackwardStepTask]] * warmup, []]
            assert peak(tasks) == min(warmup + 1, total)


@pytest.mark.core(keep=3)
@pytest.mark.parametrize("stages", [*STAGES, 16])
def test_1f1b_is_in_torchs_order(stages: int) -> None:
    """torch's own list for the last rank lacks micro-batch 0 and has one too many: it is a forward and its backward in turn."""
    for count in sorted({stages, stages + 1, 2 * stages, 3 * stages + 1, 32}):
        torchs = get_schedule_ops("1F1B", stages, count)
        ours = [computed(rank, tasks, stages) for rank, tasks in enumerate(one_chunk(count, stages))]
        assert ours[:-1] == [[str(one) for one in row if one is not None and "REDUCE" not in str(one)] for row in torchs[:-1]]
        assert ours[-1] == [f"{stages - 1}{letter}{mb}" for mb in range(count) for letter in "FB"]


@pytest.mark.core(keep=3)
@pytest.mark.parametrize("stages", STAGES)
@pytest.mark.parametrize("chunks", [2, 3])
def test_interleaved_is_in_torchs_order(stages: int, chunks: int) -> None:
    """Unless there are as many micro-batches as stages: then forwards are all first, in torch's order, and backwards follow."""
    for count in micro_batches(stages)[:4]:
        torchs = get_schedule_ops("Interleaved1F1B", stages, count, num_stages_per_rank=chunks)
        for rank, (tasks, row) in enumerate(zip(interleaved(count, chunks, stages), torchs, strict=True)):
            theirs = [str(one) for one in row if one is not None]
            if count == stages:
                theirs.sort(key=lambda one: "B" in one)
            assert computed(rank, tasks, stages) == theirs


@pytest.mark.parametrize(
    ("ranks", "peaks"), [(one_chunk(8, 4), [4, 3, 2, 1]), (interleaved(8, 2, 4), [11, 9, 7, 5]), (interleaved(4, 2, 4), [8] * 4)]
)
def test_what_ranks_keep(ranks: list[list[PipelineTask]], peaks: list[int]) -> None:
    assert [peak(tasks) for tasks in ranks] == peaks


@pytest.mark.core(keep=3)
@pytest.mark.parametrize("stages", [1, *STAGES])
@pytest.mark.parametrize("chunks", CHUNKS)
def test_inference(stages: int, chunks: int) -> None:
    """All chunks run, any number of micro-batches; with one chunk sends may wait for their receives."""
    for count in range(1, 33):
        schedules = [InferenceSchedule(count, stages, rank, num_model_chunks=chunks) for rank in range(stages)]
        ranks = [flat(schedule) for schedule in schedules]
        for tasks in ranks:
            assert {*tasks} == {kind(mb, chunk) for kind in TASKS[:3] for mb in range(count) for chunk in range(chunks)}
            check_order(tasks)
        assert not stuck(ranks, stages * chunks - 1, sends_wait=False)
        assert chunks > 1 or not stuck(ranks, stages - 1, sends_wait=True)
        assert all(len(list(schedule)) == count * chunks for schedule in schedules)


def test_a_simulation_can_get_stuck() -> None:
    ranks = one_chunk(2, 2)
    ranks[1].remove(BackwardPostprocessTask(0))
    assert stuck(ranks, 1, sends_wait=False) == ["rank 0: <B0", "rank 1: <F1"]
    ranks = [[ForwardPostprocessTask(0), BackwardPreprocessTask(0)], [BackwardPostprocessTask(0), ForwardPreprocessTask(0)]]
    assert not stuck(ranks, 1, sends_wait=False)
    assert stuck(ranks, 1, sends_wait=True) == ["rank 0: F0>", "rank 1: B0>"]


TIMED = (
    "<F0 F0|F0>|<F1 F1|F1>||||<B0 B0||<B1 B1 reduce",
    "|<F0 F0|F0>|<F1 F1|F1>||<B0 B0|B0>|<B1 B1|B1> reduce",
    "||<F0 F0|F0>|<F1 F1|<B0 F1> B0|B0>|<B1 B1|B1>|reduce",
    "|||<F0 F0|B0|B0> <F1 F1|B1|B1>||reduce",
)


@pytest.mark.parametrize("rank", range(4))
def test_the_old_schedule_keeps_time(rank: int) -> None:
    """2 * (M + P - 1) steps, empty where a rank waits; the new one has no such steps."""
    assert [short(step) for step in TrainSchedule(num_microbatches=2, stages=4, stage_id=rank).steps()] == TIMED[rank].split("|")
    for count, stages in itertools.product((1, 5, 32), (4, 5, 16)):
        steps = list(TrainSchedule(count, stages, rank))
        assert len(steps) == 2 * (count + stages - 1) and steps[-1][-1] == ReduceGradsTask()


@pytest.mark.parametrize(
    ("make", "steps"),
    [
        (lambda: Train1F1BSchedule(3, 4, 2), "<F0 F0 F0>|<F1 F1|<B0 F1> B0 B0>|<F2 F2|<B1 F2> B1 B1>|<B2 B2 B2>|reduce"),
        (lambda: Train1F1BSchedule(2, 2, 1), "<F0 F0|B0 B0>|<F1 F1|B1 B1>|reduce"),
        (lambda: Train1F1BSchedule(1, 4, 0), "<F0 F0 F0>|<B0 B0|reduce"),
        (lambda: InferenceSchedule(2, 4, 2), "<F0 F0 F0>|<F1 F1 F1>"),
        (
            lambda: InferenceSchedule(3, 2, 0, num_model_chunks=2),
            "<F0 F0 F0>|<F1 F1 F1>|<F0.1 F0.1 F0.1>|<F1.1 F1.1 F1.1>|<F2 F2 F2>|<F2.1 F2.1 F2.1>",
        ),
        (
            lambda: TrainInterleavedSchedule(2, 1, 2, 0),
            "<F0 F0 <F1 F0>|F1 F1> <B0|B0 <B1|B1|reduce",
        ),
        (
            lambda: TrainInterleavedSchedule(4, 1, 2, 1),
            "<F0 F0 B0 <F1 B0>|F1 B1 <F2 B1>|F2 B2 <F3 B2>|F3 B3 B3>|reduce",
        ),
        (
            lambda: TrainInterleavedSchedule(4, 1, 2, 1, fused_send_recv=True, fused_fwd_bwd=True),
            "<F0 F0+ B0 <F1+ B0>|F1+ B1 <F2+ B1>|F2+ B2 <F3+ B2>|F3+ B3 B3>|reduce",
        ),
        (
            lambda: TrainInterleavedSchedule(2, 2, 2, 0, fused_send_recv=True, use_odd_even_scheduler=True),
            "<F0 F0 <F1 F0>|F1 <F0.1 F1>|F0.1 <F1.1 F0.1>|F1.1 F1.1> <B0.1|B0.1 B0.1> <B1.1|B1.1 B1.1> <B0|B0 <B1|B1|reduce",
        ),
        (
            lambda: TrainInterleavedSchedule(2, 2, 2, 1, use_odd_even_scheduler=True),
            "<F0 F0 F0> <F1|F1 F1> <F0.1|F0.1 <F1.1|F1.1|B0.1 B0.1>|B1.1 <B0 B1.1>|B0 <B1 B0>|B1 B1>|reduce",
        ),
    ],
)
def test_steps(make: Callable[[], PipeSchedule], steps: str) -> None:
    assert [short(step) for step in make()] == steps.split("|")


def test_orders_of_messages() -> None:
    """In a step with all four of them; of what is fused, the first has no graph break."""
    orders = {(1, False): "<F B> F> <B", (2, False): "F> <B <F B>", (1, True): "F> <F <B B>", (2, True): "<F F> B> <B"}
    for (rank, odd_even), order in orders.items():
        for fused in (False, True):
            schedule = TrainInterleavedSchedule(9, 3, 3, rank, fused_send_recv=fused, use_odd_even_scheduler=odd_even)
            step = next(step for step in schedule if len(step) == 6)
            assert "".join(c for c in short(step[2:]) if c in "<FB> ") == order
            assert [task.graph_break for task in step] == [True, True, not fused, True, not fused, True]


def test_a_pipeline_of_one_rank() -> None:
    """It is its own neighbour: what it receives it has sent before."""
    for chunks, count in itertools.product(CHUNKS, (1, 2, 5)):
        ranks = interleaved(count, chunks, 1)
        assert not stuck(ranks, chunks - 1, sends_wait=False)
        check_tasks(0, ranks[0], count, chunks, 1)


def test_tasks_are_values() -> None:
    assert str([ForwardStepTask(mb=3), ReduceGradsTask()]) == "[ForwardStepTask_microbatch_3_modelchunk_0_graphbreak_True, ReduceGradsTask]"
    for kind in TASKS:
        task = kind(1, 2, False)
        assert repr(task) == f"{kind.__name__}_microbatch_1_modelchunk_2_graphbreak_False"
        assert task == kind(mb=1, model_chunk=2, graph_break=False) and hash(task) == hash(kind(1, 2, False))
        assert task != kind(1, 2) and task != kind(1, 1, False) and task != kind(0, 2, False)
        assert (kind(4).mb, kind(4).model_chunk, kind(4).graph_break) == (4, 0, True)
        assert pickle.loads(pickle.dumps(task)) == task
    assert len({kind(0) for kind in TASKS}) == len(TASKS)
    assert ReduceGradsTask() == ReduceGradsTask() != ForwardStepTask(-1, -1)
    assert ReduceGradsTask().mb == ReduceGradsTask().model_chunk == -1
    assert pickle.loads(pickle.dumps(ReduceGradsTask())) == ReduceGradsTask()


def test_what_a_schedule_says_of_itself() -> None:
    first, last = Train1F1BSchedule(6, 4, 0), InferenceSchedule(num_microbatches=6, stages=4, stage_id=3)
    assert (first.stage, first.num_stages, first.num_microbatches) == (0, 4, 6) and last.stage == 3
    assert (first.is_first_stage, first.is_last_stage, last.is_first_stage, last.is_last_stage) == (True, False, False, True)
    assert (
        [first._valid_micro_batch(mb) for mb in (-1, 0, 5, 6)]
        == [first._valid_stage(r) for r in (-1, 0, 3, 4)]
        == [False, True, True, False]
    )
    assert list(first) == list(first) == list(first.steps())
    assert not TrainInterleavedSchedule(4, 2, 4, 0, fused_fwd_bwd=True).fused_fwd_bwd
    with pytest.raises(TypeError, match="abstract"):
        PipeSchedule(1, 1, 0)


def test_the_module_is_the_alias() -> None:
    assert scheduler is nxd_jax.pipeline.scheduler and {kind.__name__ for kind in TASKS} < set(scheduler.__all__)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Train1F1BSchedule(0, 2, 0), "num_microbatches=0: a schedule needs 1 or more of each; pass 1 where there is no division"),
        (lambda: TrainSchedule(-1, 0, 0), "num_microbatches=-1, stages=0: a schedule needs 1 or more"),
        (lambda: InferenceSchedule(1, 2, 0, num_model_chunks=0), "num_model_chunks=0: a schedule needs 1 or more"),
        (lambda: TrainInterleavedSchedule(2, 0, 2, 0), "num_model_chunks=0: a schedule needs 1 or more"),
        (
            lambda: InferenceSchedule(1, 2, 2),
            "stage_id=2: 2 stages are numbered 0 to 1; pass the pipeline rank .*get_pipeline_model_parallel_rank",
        ),
        (lambda: Train1F1BSchedule(1, 4, -1), "stage_id=-1: 4 stages are numbered 0 to 3"),
        (
            lambda: TrainInterleavedSchedule(6, 2, 4, 0),
            "num_microbatches=6, stages=4: .* a multiple of stages; take 4 or 8 micro-batches, or one chunk .*virtual_pipeline_size=1",
        ),
        (lambda: TrainInterleavedSchedule(3, 2, 4, 0), "num_microbatches=3, stages=4: .*; take 4 micro-batches, or one chunk"),
    ],
)
def test_errors(make: Callable[[], PipeSchedule], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        make()
