"""All ranks of a schedule, run without a model: who waits for whom, what was computed, how much was kept."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from nxd_jax.pipeline import scheduler
from nxd_jax.pipeline.scheduler import PipelineTask, PipeSchedule

Message = tuple[str, int, int]
"""F or B, the stage that gets it, the micro-batch."""

SENDS = {scheduler.ForwardPostprocessTask: ("F", 1), scheduler.BackwardPostprocessTask: ("B", -1)}
RECEIVES = {scheduler.ForwardPreprocessTask: "F", scheduler.BackwardPreprocessTask: "B"}
STEPS = {scheduler.ForwardStepTask: "F", scheduler.BackwardStepTask: "B"}


def flat(schedule: PipeSchedule) -> list[PipelineTask]:
    return [task for step in schedule for task in step]


def short(tasks: Iterable[PipelineTask]) -> str:
    """`<F0 F0 F0>`: get the inputs, run forward, send the outputs of micro-batch 0; B: gradients. `.c` for chunk c, `+` where no graph break follows."""
    return " ".join(_short(task) for task in tasks)


def _short(task: PipelineTask) -> str:
    kind = type(task)
    if kind is scheduler.ReduceGradsTask:
        return "reduce"
    name = f"{task.mb}.{task.model_chunk}" if task.model_chunk else f"{task.mb}"
    joined = "" if task.graph_break else "+"
    if kind in RECEIVES:
        return f"<{RECEIVES[kind]}{name}{joined}"
    return f"{STEPS[kind]}{name}{joined}" if kind in STEPS else f"{SENDS[kind][0]}{name}>{joined}"


def computed(rank: int, tasks: Iterable[PipelineTask], stages: int) -> list[str]:
    """Forwards and backwards as torch's `_Action` prints them: stage, letter, micro-batch."""
    return [f"{task.model_chunk * stages + rank}{STEPS[type(task)]}{task.mb}" for task in tasks if type(task) in STEPS]


def peak(tasks: Iterable[PipelineTask]) -> int:
    """The most forwards that wait for their backwards."""
    kept = most = 0
    for task in tasks:
        kept += {"F": 1, "B": -1}.get(STEPS.get(type(task), ""), 0)
        most = max(most, kept)
    return most


def stuck(ranks: Sequence[Sequence[PipelineTask]], last_stage: int, *, sends_wait: bool) -> list[str]:
    """Run all ranks; what each of those that cannot go on stands before. No answer: all tasks ran, and every message arrived once.

    sends_wait: a send ends when its receive has begun. Otherwise it ends at once.
    """
    at, sent = [0] * len(ranks), set[Message]()
    moved = True
    while moved:
        moved = False
        for rank, tasks in enumerate(ranks):
            while at[rank] < len(tasks) and _goes_on(ranks, at, rank, last_stage, sent, sends_wait):
                moved = True
    assert not sent or not all(at[rank] == len(tasks) for rank, tasks in enumerate(ranks)), f"nobody received {sent}"
    return [f"rank {rank}: {_short(tasks[at[rank]])}" for rank, tasks in enumerate(ranks) if at[rank] < len(tasks)]


def _goes_on(ranks: Sequence[Sequence[PipelineTask]], at: list[int], rank: int, last: int, sent: set[Message], sends_wait: bool) -> bool:
    task = ranks[rank][at[rank]]
    received, message = _received(task, rank, len(ranks)), _sent(task, rank, len(ranks), last)
    if received is not None:
        if received not in sent:
            return False
        sent.remove(received)
    if message is not None:
        assert message not in sent, f"{message} was sent twice"
        other = message[1] % len(ranks)
        if sends_wait and (at[other] == len(ranks[other]) or _received(ranks[other][at[other]], other, len(ranks)) != message):
            return False
        sent.add(message)
    at[rank] += 1
    return True


def _received(task: PipelineTask, rank: int, stages: int) -> Message | None:
    kind, stage = RECEIVES.get(type(task)), task.model_chunk * stages + rank
    return (kind, stage, task.mb) if kind == "B" or (kind == "F" and stage) else None


def _sent(task: PipelineTask, rank: int, stages: int, last: int) -> Message | None:
    """Inference has a task after the model's last stage too, which sends nothing."""
    if type(task) not in SENDS:
        return None
    kind, way = SENDS[type(task)]
    stage = task.model_chunk * stages + rank + way
    return None if kind == "F" and stage > last else (kind, stage, task.mb)
