"""The schedules that can be chosen by name."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass

from nxd_jax.pipeline.schedules import dualpipev, one_backward, zero_bubble
from nxd_jax.pipeline.schedules.actions import Action
from nxd_jax.pipeline.schedules.schedule import Layout, Schedule, ScheduleError, ranks_of_stages


@dataclass(frozen=True)
class ScheduleKind:
    """A kind of schedule.

    Attributes:
        orders: gives the orders by rank, of (ranks, chunks, microbatches).
        chunks: how many stages a rank has: so many; or at least so many, if `several`.
        several: whether more chunks than `chunks` are possible.
        layout: how stages lie on ranks.
        aliases: other names of it; case, `_`, `-` and a leading "schedule" do not count.
    """

    orders: Callable[[int, int, int], list[list[Action]]]
    chunks: int = 1
    several: bool = False
    layout: Layout = "loop"
    aliases: tuple[str, ...] = ()


KINDS: dict[str, ScheduleKind] = {
    "gpipe": ScheduleKind(one_backward.gpipe),
    "1f1b": ScheduleKind(one_backward.one_f_one_b, aliases=("PipeDream-Flush",)),
    "looped_bfs": ScheduleKind(one_backward.looped_bfs, 1, True),
    "interleaved": ScheduleKind(one_backward.interleaved, 2, True, aliases=("Interleaved1F1B",)),
    "zb_h1": ScheduleKind(zero_bubble.zb_h1, aliases=("ZeroBubble", "ZBH1")),
    "interleaved_zero_bubble": ScheduleKind(zero_bubble.interleaved_zero_bubble, 2, True, aliases=("ZB1P",)),
    "zbv": ScheduleKind(zero_bubble.zbv, 2, False, "v", aliases=("ZBVZeroBubble",)),
    "dualpipev": ScheduleKind(dualpipev.dualpipev, 2, False, "v"),
}


def find(name: str) -> str:
    """The name in `KINDS` of a schedule. Raises ScheduleError, with what was perhaps meant."""
    plain = _plain(name)
    names = {_plain(one): known for known, kind in KINDS.items() for one in (known, *kind.aliases)}
    if plain in names:
        return names[plain]
    near = difflib.get_close_matches(plain, names, n=1)
    meant = f" (did you mean {names[near[0]]!r}?)" if near else ""
    raise ScheduleError(
        f"there is no pipeline schedule {name!r}{meant}; choose one of {', '.join(KINDS)}, or give one of your own (a list of actions per rank)"
    )


def _plain(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "").replace(" ", "").removeprefix("schedule")


def make(name: str, ranks: int, microbatches: int, chunks: int | None = None) -> Schedule:
    """A schedule by name.

    Args:
        name: one of `KINDS`, or the name of torch's class.
        ranks: NxD's pipeline_parallel_size.
        microbatches: NxD's num_microbatches.
        chunks: NxD's virtual_pipeline_size, the stages per rank; default: the fewest that the kind has.

    Raises ScheduleError for numbers that the kind does not allow.
    """
    name = find(name)
    kind = KINDS[name]
    chunks = kind.chunks if chunks is None else chunks
    for what, value in ("pipeline_parallel_size", ranks), ("num_microbatches", microbatches), ("virtual_pipeline_size", chunks):
        if value < 1:
            raise ScheduleError(f"{what}={value} must be at least 1")
    if chunks < kind.chunks or (chunks > kind.chunks and not kind.several):
        allowed = f"at least {kind.chunks}" if kind.several else f"{kind.chunks}"
        raise ScheduleError(
            f"the pipeline schedule {name} has {allowed} stage(s) per rank: set virtual_pipeline_size to that, it is {chunks}"
        )
    orders = kind.orders(ranks, chunks, microbatches)
    return Schedule(name, tuple(map(tuple, orders)), ranks_of_stages(ranks, chunks, kind.layout), microbatches)
