"""A pipeline schedule as data: what every rank does, in order."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from nxd_jax.pipeline.schedules.actions import Action, Kind, parse

Layout = Literal["loop", "v"]


class ScheduleError(ValueError):
    """A schedule that cannot be run, or a number that a schedule does not allow."""


def ranks_of_stages(ranks: int, chunks: int, layout: Layout = "loop") -> tuple[int, ...]:
    """Which rank holds each stage.

    chunks: stages per rank. layout: "loop": 0 1 2 3 0 1 2 3 (NxD's: stage `chunk * ranks + rank`); "v": 0 1 2 3 3 2 1 0, so that rank 0 has the first stage
    and the last.
    """
    there = list(range(ranks))
    return tuple(rank for chunk in range(chunks) for rank in (there[::-1] if layout == "v" and chunk % 2 else there))


@dataclass(frozen=True)
class Schedule:
    """What every rank does, in order.

    Attributes:
        name: of its kind (`KINDS`), or a user's.
        orders: by rank, its actions.
        placement: by stage, the rank that holds it.
        microbatches: how many micro-batches a step has.
    """

    name: str
    orders: tuple[tuple[Action, ...], ...]
    placement: tuple[int, ...]
    microbatches: int

    @property
    def ranks(self) -> int:
        """NxD's pipeline_parallel_size."""
        return len(self.orders)

    @property
    def stages(self) -> int:
        """Stages of all ranks together."""
        return len(self.placement)

    @property
    def splits_backward(self) -> bool:
        """Whether gradients of weights are computed apart from those of inputs."""
        return any(action.kind is Kind.WEIGHT_BACKWARD for order in self.orders for action in order)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that a rank holds, in the order of the model."""
        return tuple(stage for stage, holder in enumerate(self.placement) if holder == rank)

    def csv(self) -> str:
        """A table as torch's `_load_csv(format="compute_only")` reads it: a row for each rank, an action in each cell."""
        out = io.StringIO()
        csv.writer(out, lineterminator="\n").writerows([[str(action) for action in order] for order in self.orders])
        return out.getvalue()


def from_orders(orders: Sequence[Iterable[Any]], placement: Sequence[int] | None = None, name: str = "custom") -> Schedule:
    """A schedule of one's own.

    orders: by rank, actions: `Action`s, text as `2F0`, torch's `_Action`s, or None for idle time. placement: by stage, its rank; default: the rank whose
    order has the stage. Whether it can be run, `validate.check` says. Raises ScheduleError for a stage of two ranks or of none, ValueError for text that is
    no action.
    """
    made = tuple(tuple(action for cell in order for action in _actions(cell)) for order in orders)
    found = {action.stage: rank for rank, order in enumerate(made) for action in order}
    if not found:
        raise ScheduleError(f"the schedule {name} has no actions: give for each rank a list of actions such as '0F0', '0B0'")
    if placement is None:
        missing = sorted(set(range(max(found) + 1)) - set(found))
        if missing:
            raise ScheduleError(f"no rank of the schedule {name} has an action of stage {missing[0]}, but one has of stage {max(found)}")
        placement = [found[stage] for stage in range(max(found) + 1)]
    return Schedule(name, made, tuple(placement), 1 + max(action.microbatch for order in made for action in order))


def from_csv(table: str | Path, name: str | None = None) -> Schedule:
    """A schedule from a file of torch's format, or from its text (a string with a newline or without a path's suffix).

    A row for each rank, an action in each cell; empty cells are idle time, and communication is left out, for it follows from the computations. Raises
    ScheduleError for a file that is not there.
    """
    path = Path(table) if isinstance(table, Path) or (table.endswith(".csv") and "\n" not in table) else None
    if path is not None and not path.is_file():
        raise ScheduleError(
            f"there is no file {path} with a pipeline schedule: give the path of torch's CSV table, or the name of a schedule"
        )
    text = str(table) if path is None else path.read_text()
    return from_orders(list(csv.reader(io.StringIO(text))), name=name or (path.stem if path else "custom"))


def _actions(cell: Any) -> tuple[Action, ...]:
    if cell is None:
        return ()
    return (cell,) if isinstance(cell, Action) else parse(str(cell))
