"""`pipeline/schedules`: orders, idle time and live activations equal the formulas and torch's own tables; what cannot run is refused by name."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

from nxd_jax.pipeline import schedules
from nxd_jax.pipeline.schedules import Action, Kind, Schedule, ScheduleError, Stuck, Timeline, Times

RANKS = (1, 2, 3, 4, 8)
ONE_CHUNK = ("gpipe", "1f1b", "zb_h1")
LOOPED = ("looped_bfs", "interleaved", "interleaved_zero_bubble")
V = ("zbv", "dualpipev")


def timeline(schedule: Schedule, **times: float) -> Timeline:
    found = schedules.run(schedule, Times(**times))
    assert isinstance(found, Timeline)
    return found


def bubble(found: Timeline, rank: int = 0) -> float:
    """Idle time of a rank in the whole step; it is the same of every rank where ranks do equal work."""
    return found.idle(rank)


def peaks(found: Timeline) -> list[int]:
    return [found.peak(rank) for rank in range(found.schedule.ranks)]


# -- every schedule can be run --------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("name", ONE_CHUNK)
def test_one_chunk_of_any_number_of_microbatches(name: str, ranks: int) -> None:
    for microbatches in (*range(1, 2 * ranks + 2), 4 * ranks + 1):
        schedules.check(schedules.make(name, ranks, microbatches), microbatches, tuple(range(ranks)))


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("chunks", [2, 3, 4])
@pytest.mark.parametrize("name", LOOPED)
def test_several_chunks(name: str, chunks: int, ranks: int) -> None:
    for microbatches in (*range(1, ranks), ranks, 2 * ranks, 3 * ranks, 4 * ranks):
        found = schedules.make(name, ranks, microbatches, chunks)
        schedules.check(found, microbatches, tuple(stage % ranks for stage in range(chunks * ranks)))


@pytest.mark.parametrize("name", ["interleaved", "interleaved_zero_bubble"])
def test_groups_need_not_have_as_many_microbatches_as_there_are_ranks(name: str) -> None:
    """10 micro-batches over 4 ranks are two groups of 5, as in torch; NxD refuses them."""
    schedules.check(schedules.make(name, 4, 10))


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("name", V)
def test_two_chunks_in_a_v(name: str, ranks: int) -> None:
    for microbatches in range(2 * ranks if name == "dualpipev" else 1, 5 * ranks + 2):
        found = schedules.make(name, ranks, microbatches)
        schedules.check(found)
        assert found.stages_of(0) == (0, 2 * ranks - 1) and found.placement[ranks] == ranks - 1


# -- the formulas -----------------------------------------------------------------------------------------

SPANS = ({}, {"forward": 2.0, "input_backward": 3.0, "weight_backward": 1.0}, {"weight_backward": 1.5})


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("times", SPANS)
def test_idle_time_of_whole_backward_passes(ranks: int, times: dict[str, float]) -> None:
    one = Times(**times)
    both = (ranks - 1) * (one.forward + one.input_backward + one.weight_backward)
    for microbatches in (ranks, 4 * ranks):
        for name in ("gpipe", "1f1b"):
            assert bubble(timeline(schedules.make(name, ranks, microbatches), **times)) == both
        for name in ("looped_bfs", "interleaved"):
            for chunks in (2, 3):
                assert bubble(timeline(schedules.make(name, ranks, microbatches, chunks), **times)) == both


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("microbatch_groups", [1, 2, 4])
def test_idle_time_of_split_backward_passes(ranks: int, microbatch_groups: int) -> None:
    """With equal times (P-1)(F+I-W) = P-1, a third of 1F1B's; and within a rank's own span none in ZBV."""
    microbatches = microbatch_groups * ranks
    assert bubble(timeline(schedules.make("zb_h1", ranks, microbatches))) == ranks - 1
    for chunks in (2, 3):
        assert bubble(timeline(schedules.make("interleaved_zero_bubble", ranks, microbatches, chunks))) == ranks - 1
    if microbatches >= 2 * ranks:
        found = timeline(schedules.make("zbv", ranks, microbatches))
        assert [found.waiting(rank) for rank in range(ranks)] == [0.0] * ranks
        assert bubble(found) == ranks - 1


@pytest.mark.parametrize(("ranks", "idle"), [(4, 6.0), (8, 14.0)])
def test_idle_time_of_dualpipev(ranks: int, idle: float) -> None:
    """(P-1)(F&B + B - 3W), with F&B = F + B: 2(P-1) at equal times, were the two not one after the other."""
    found = timeline(schedules.make("dualpipev", ranks, 4 * ranks))
    assert bubble(found) <= idle and bubble(found) == ranks - 1


def test_live_activations() -> None:
    for ranks in (2, 4, 8):
        many = 4 * ranks
        assert peaks(timeline(schedules.make("gpipe", ranks, many))) == [many] * ranks
        assert peaks(timeline(schedules.make("1f1b", ranks, many))) == list(range(ranks, 0, -1))
        assert peaks(timeline(schedules.make("zb_h1", ranks, many))) == [ranks] * ranks
        assert peaks(timeline(schedules.make("zbv", ranks, many))) == [2 * ranks] * ranks
        assert peaks(timeline(schedules.make("dualpipev", ranks, many))) == [2 * ranks + 1] * ranks
        for chunks in (2, 3):
            assert peaks(timeline(schedules.make("looped_bfs", ranks, many, chunks))) == [chunks * many] * ranks
            expected = [(chunks - 1) * ranks + 2 * (ranks - 1 - rank) + 1 for rank in range(ranks)]
            assert peaks(timeline(schedules.make("interleaved", ranks, many, chunks))) == expected
            assert peaks(timeline(schedules.make("interleaved_zero_bubble", ranks, many, chunks))) == [chunks * ranks] * ranks
    assert peaks(timeline(schedules.make("1f1b", 4, 2))) == [2, 2, 2, 1]  # fewer micro-batches than ranks


def test_bubble_share() -> None:
    """(P-1)/(M+P-1) of 1F1B."""
    assert timeline(schedules.make("1f1b", 4, 12)).idle_share == pytest.approx(3 / 15)
    assert timeline(schedules.make("1f1b", 1, 5)).idle_share == 0.0


@pytest.mark.parametrize("ranks", [4, 8])
@pytest.mark.parametrize(
    ("name", "idle"), [(name, 1.0 if "zb" in name or "zero" in name or name == "dualpipev" else 3.0) for name in schedules.KINDS]
)
def test_idle_share_is_the_formulas(name: str, idle: float, ranks: int) -> None:
    """Of (P-1)(F+B) or (P-1)(F+I-W) in units of a stage, at equal times and with durations that vary by a tenth."""
    made = schedules.make(name, ranks, 4 * ranks)
    work = 3 * 4 * ranks * schedules.KINDS[name].chunks
    share = (ranks - 1) * idle / (work + (ranks - 1) * idle)
    assert timeline(made).idle_share == pytest.approx(share)
    rng = random.Random(0)
    durations = {action: rng.uniform(0.95, 1.05) * Times().of(action.kind) for order in made.orders for action in order}
    found = schedules.run(made, durations=durations)
    assert isinstance(found, Timeline)
    assert {task.action: task.end - task.start for tasks in found.tasks for task in tasks} == pytest.approx(durations)
    assert found.idle_share == pytest.approx(share, abs=0.05)


def test_transfers_take_time() -> None:
    alone, far = (timeline(schedules.make("1f1b", 2, 1), transfer=t).end for t in (0.0, 5.0))
    assert (alone, far) == (6.0, 16.0)
    v = schedules.make("zbv", 1, 1)
    assert timeline(v, transfer=5.0).end == timeline(v).end == 6.0  # both chunks are on one rank


def test_stages_may_differ() -> None:
    found = schedules.run(schedules.make("gpipe", 2, 1), [Times(1, 1, 1), Times(10, 10, 10)])
    assert isinstance(found, Timeline) and found.end == 33.0


# -- torch's tables ---------------------------------------------------------------------------------------


def theirs(name: str, ranks: int, microbatches: int, chunks: int | None = None) -> Schedule:
    return schedules.from_orders(get_schedule_ops(name, ranks, microbatches, chunks))


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_orders_equal_torch(ranks: int) -> None:
    for microbatches in (ranks, 2 * ranks, 4 * ranks):
        assert schedules.make("gpipe", ranks, microbatches).orders == theirs("GPipe", ranks, microbatches).orders
        for chunks in (2, 3):
            ours = schedules.make("interleaved", ranks, microbatches, chunks)
            assert ours.orders == theirs("Interleaved1F1B", ranks, microbatches, chunks).orders
            ours = schedules.make("looped_bfs", ranks, microbatches, chunks)
            assert ours.orders == theirs("LoopedBFS", ranks, microbatches, chunks).orders
        if microbatches >= 2 * ranks:
            assert schedules.make("dualpipev", ranks, microbatches).orders == theirs("DualPipeV", ranks, microbatches).orders


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_1f1b_equals_torch_but_on_the_last_rank(ranks: int) -> None:
    """torch's table of the last rank is off by one: it lacks F0, and has one forward pass too many."""
    rows = get_schedule_ops("1F1B", ranks, 2 * ranks)
    ours = schedules.make("1f1b", ranks, 2 * ranks).orders
    letters = [[str(a) for a in row if a is not None and str(a)[1] in "FB"] for row in rows]
    assert [[str(a) for a in order] for order in ours[:-1]] == letters[:-1]
    assert [str(a) for a in ours[-1][:4]] == [f"{ranks - 1}{what}" for what in ("F0", "B0", "F1", "B1")]


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_zero_bubbles_are_no_worse_than_torch(ranks: int) -> None:
    """Where several orders are as good, ours need not be torch's."""
    for ours, name in ("interleaved_zero_bubble", "InterleavedZeroBubble"), ("zbv", "ZBVZeroBubble"):
        for microbatches in (2 * ranks, 4 * ranks):
            found, other = timeline(schedules.make(ours, ranks, microbatches)), timeline(theirs(name, ranks, microbatches))
            assert found.end <= other.end and max(peaks(found)) <= max(peaks(other)), (name, microbatches)


# -- one's own --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", schedules.KINDS)
def test_tables_are_torchs(name: str, tmp_path: Path) -> None:
    made = schedules.make(name, 4, 8)
    file = tmp_path / "own.csv"
    file.write_text(made.csv())
    read = schedules.from_csv(file)
    assert (read.name, read.orders, read.placement, read.microbatches) == ("own", made.orders, made.placement, 8)
    assert schedules.from_csv(made.csv()).orders == made.orders
    assert schedules.from_csv(str(file)).name == "own"


def test_tables_with_communication_and_overlap() -> None:
    table = "0F0,,0SEND_F0,0RECV_B0,0I0,0W0,0REDUCE_GRAD\n1UNSHARD,1RECV_F0,(1F0;1B0)OVERLAP_F_B,1SEND_B0,\n"
    found = schedules.from_csv(table)
    assert [[str(action) for action in order] for order in found.orders] == [["0F0", "0I0", "0W0"], ["1F0", "1B0"]]
    schedules.check(found)
    assert found.splits_backward and not schedules.make("1f1b", 2, 2).splits_backward


def test_orders_of_text_actions_and_none() -> None:
    found = schedules.from_orders([["0F0", None, Action(0, Kind.BACKWARD, 0)]], name="mine")
    assert found.orders == ((Action(0, Kind.FORWARD, 0), Action(0, Kind.BACKWARD, 0)),) and found.name == "mine"


def test_random_orders_that_finish_are_valid_and_others_are_refused() -> None:
    """`check` and a simulation that may do any ready action agree on which orders deadlock."""
    rng = random.Random(0)
    refused = 0
    for _ in range(200):
        orders = [list(order) for order in schedules.make(rng.choice(ONE_CHUNK), 3, 4).orders]
        for _ in range(rng.randrange(1, 4)):
            order = rng.choice(orders)
            a, b = rng.randrange(len(order)), rng.randrange(len(order))
            order[a], order[b] = order[b], order[a]
        schedule = schedules.from_orders(orders)
        stuck = isinstance(schedules.run(schedule), Stuck)
        refused += stuck
        assert stuck == _deadlocks([list(map(str, order)) for order in orders])
        if stuck:
            with pytest.raises(ScheduleError, match="deadlocks: rank"):
                schedules.check(schedule)
        else:
            schedules.check(schedule)
    assert 20 < refused < 180


def _deadlocks(orders: list[list[str]]) -> bool:
    """By text alone: an order's head may go when what it needs is no longer in any order."""
    while any(orders):
        waiting = {action for order in orders for action in order}
        for order in orders:
            if order and not _needs(order[0]) & waiting:
                order.pop(0)
                break
        else:
            return True
    return False


def _needs(action: str) -> set[str]:
    stage, kind, microbatch = int(action[0]), action[1], action[2:]
    if kind == "F":
        return {f"{stage - 1}F{microbatch}"}
    if kind == "W":
        return {f"{stage}I{microbatch}"}
    return {f"{stage}F{microbatch}", f"{stage + 1}B{microbatch}", f"{stage + 1}I{microbatch}"}


# -- mistakes ---------------------------------------------------------------------------------------------

GOOD = [["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]]


def _changed(rank: int, at: int, *new: str) -> list[list[str]]:
    orders = [list(order) for order in GOOD]
    orders[rank][at : at + 1] = new
    return orders


@pytest.mark.parametrize(
    ("orders", "said"),
    [
        (_changed(0, 1), "lacks 0F1 on rank 0"),
        (_changed(1, 3), "lacks 1B1 on rank 1"),
        (_changed(1, 1, "1B0", "1B0"), "repeats 1B0: 2 times on rank 1"),
        (_changed(1, 1, "1I0"), "lacks 1W0 on rank 1"),
        (_changed(1, 1, "1W0"), "lacks 1I0 on rank 1"),
        (_changed(1, 1, "1B0", "1I0"), r"has both 1B0 and 1I0 on rank 1: a backward pass is whole \(B\) or in two parts \(I, W\)"),
        (_changed(1, 1, "1W0", "1I0"), "deadlocks: rank 1 is at 1W0 and waits for 1I0, which comes later in its own order"),
        (
            [["0F0", "0B0", "0F1", "0B1"], ["1F1", "1B1", "1F0", "1B0"]],
            r"deadlocks: rank 0 is at 0B0 and waits for 1B0 \(or 1I0\); rank 1 is at 1F1 and waits for 0F1. Each comes later in the order of its rank",
        ),
    ],
)
def test_what_check_refuses(orders: list[list[str]], said: str) -> None:
    schedules.check(schedules.from_orders(GOOD))
    with pytest.raises(ScheduleError, match=f"the pipeline schedule custom {said}"):
        schedules.check(schedules.from_orders(orders))


def test_a_stage_on_two_ranks() -> None:
    with pytest.raises(ScheduleError, match="has 1B0 on rank 0, but stage 1 is on rank 1"):
        schedules.check(schedules.from_orders([["0F0", "1B0"], ["1F0"]], placement=(0, 1)))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("2F0", None), "has 2F0 on rank 0, but there are only 2 stages"),
        (("0F9", None), "has 0F9 on rank 0, but there are only 2 micro-batches"),
    ],
)
def test_actions_out_of_range(arguments: tuple[str, Any], said: str) -> None:
    made = schedules.from_orders(GOOD)
    wrong = Schedule("x", (schedules.parse(arguments[0]) + made.orders[0], made.orders[1]), made.placement, 2)
    with pytest.raises(ScheduleError, match=said):
        schedules.check(wrong)


def test_what_the_model_is_run_with() -> None:
    made = schedules.make("1f1b", 2, 4)
    with pytest.raises(ScheduleError, match="1f1b is for 4 micro-batches, and the step has num_microbatches=8"):
        schedules.check(made, microbatches=8)
    with pytest.raises(ScheduleError, match=r"has its stages on ranks \[0, 1\], and the model has them on \[1, 0\]"):
        schedules.check(made, placement=(1, 0))


def test_orders_without_sense() -> None:
    with pytest.raises(ScheduleError, match="has no actions: give for each rank a list of actions such as '0F0', '0B0'"):
        schedules.from_orders([[], [None]])
    with pytest.raises(ScheduleError, match="no rank of the schedule custom has an action of stage 1, but one has of stage 2"):
        schedules.from_orders([["0F0", "2F0"]])
    with pytest.raises(ValueError, match="'0X0' is no action of a pipeline schedule: write the stage, one of F"):
        schedules.from_orders([["0X0"]])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("zbw", 2, 4), r"there is no pipeline schedule 'zbw' \(did you mean 'zbv'\?\); choose one of gpipe, 1f1b"),
        (("qqq", 2, 4), "there is no pipeline schedule 'qqq'; choose one of gpipe"),
        (("1f1b", 0, 4), "pipeline_parallel_size=0 must be at least 1"),
        (("1f1b", 2, 0), "num_microbatches=0 must be at least 1"),
        (("1f1b", 2, 4, 2), "the pipeline schedule 1f1b has 1 stage.* per rank: set virtual_pipeline_size to that, it is 2"),
        (("interleaved", 2, 4, 1), "interleaved has at least 2 stage.* per rank: set virtual_pipeline_size to that, it is 1"),
        (("zbv", 2, 4, 3), "zbv has 2 stage.* per rank"),
        (("interleaved", 4, 9), "set num_microbatches to a multiple of 4, such as 8 or 12, or virtual_pipeline_size=1"),
        (
            ("dualpipev", 4, 7),
            "dualpipev needs at least 8 micro-batches for 4 ranks, got 7: raise num_microbatches, or choose the schedule zbv",
        ),
    ],
)
def test_what_make_refuses(arguments: tuple[Any, ...], said: str) -> None:
    with pytest.raises(ScheduleError, match=said):
        schedules.make(*arguments)


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("Schedule1F1B", "1f1b"),
        ("GPipe", "gpipe"),
        ("ZB-H1", "zb_h1"),
        ("ScheduleZBVZeroBubble", "zbv"),
        ("interleaved1f1b", "interleaved"),
    ],
)
def test_torchs_names(given: str, name: str) -> None:
    assert schedules.find(given) == name
