"""A pipeline step as text: a line for each rank, for terminals."""

from __future__ import annotations

import shutil

from nxd_jax.pipeline.schedules import Kind, Task, Timeline

IDLE = "·"
_ROOMY = 3
"""Characters of the shortest computation where there is room: a letter and a micro-batch."""
_NARROWEST = 40
_WORDS = {
    Kind.FORWARD: "F forward",
    Kind.BACKWARD: "B backward",
    Kind.INPUT_BACKWARD: "I backward of the input",
    Kind.WEIGHT_BACKWARD: "W backward of the weights",
}


def text(timeline: Timeline, width: int | None = None) -> str:
    """A line for each rank, in which a computation is as long as it takes: its letter and micro-batch, or letters alone where lines would be too long.

    width: characters that a line may have; default: those of the terminal. Lower case are later chunks of a rank.
    """
    ranks = timeline.schedule.ranks
    names = [f"rank {rank} ".ljust(len(f"rank {ranks - 1} ")) for rank in range(ranks)]
    room = max(width or shutil.get_terminal_size((120, 24)).columns, _NARROWEST) - len(names[0])
    tasks = [task for found in timeline.tasks for task in found]
    lengths = sorted(length for task in tasks if (length := task.end - task.start) > 0)
    if not lengths:
        return ""
    shortest = lengths[len(lengths) // 10]
    scale = (_ROOMY + (timeline.schedule.microbatches > 10)) / shortest
    numbered = timeline.end * scale <= room
    if not numbered:
        scale = min(1 / shortest, room / timeline.end)
    lines = [(name + _lane(timeline, rank, scale, numbered)).rstrip() for rank, name in enumerate(names)]
    return "\n".join([*lines, _legend(timeline)])


def _lane(timeline: Timeline, rank: int, scale: float, numbered: bool) -> str:
    """A rank's line without its name. Where several computations share a character, the one that begins in it last has it."""
    own = timeline.schedule.stages_of(rank)
    cells = [IDLE] * round(timeline.end * scale)
    for task in timeline.tasks[rank]:
        first, last = round(task.start * scale), round(task.end * scale)
        cells[first:last] = _cell(task, own.index(task.action.stage) > 0, last - first, numbered)
    return "".join(cells)


def _cell(task: Task, later: bool, length: int, numbered: bool) -> str:
    letter = task.action.kind.value
    letter = letter.lower() if later else letter
    label = f"{letter}{task.action.microbatch}"
    if not numbered or length < len(label):
        return letter * length
    return f"{label} {'-' * (length - len(label) - 2)}".ljust(length)[:length]


def _legend(timeline: Timeline) -> str:
    kinds = {task.action.kind for tasks in timeline.tasks for task in tasks}
    several = timeline.schedule.stages > timeline.schedule.ranks
    words = [*(word for kind, word in _WORDS.items() if kind in kinds), *(["lower case: later chunks of a rank"] * several), f"{IDLE} idle"]
    return ", ".join(words)
