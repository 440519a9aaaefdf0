"""What processes do together, counted: whether one that has done its work is waited for by another one, for ever.

Programs with collectives run in the same order in all processes that have a part in them, and so do exchanges through the store. So who is told that another
process has begun more of them, and will begin none any more, knows that the other one waits in vain.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypedDict

ALL = "all"


class Begun(TypedDict):
    """What a process tells the others. programs: how many it has begun, by the processes that run them ("all", or "0,2"). waits: the exchanges in which it
    waits: a name, the how many-th of that name, and the processes that take part."""

    programs: dict[str, int]
    waits: list[tuple[str, int, str]]


_programs: dict[str, int] = {}
_exchanges: dict[str, int] = {}
_waits: list[tuple[str, int, str]] = []


def named(among: Sequence[int] | None) -> str:
    """The processes of a program or an exchange; None: all."""
    return ALL if among is None else ",".join(map(str, among))


@contextmanager
def running(among: str) -> Iterator[None]:
    """While a program with collectives among these processes is handed to the devices. One that cannot run has not begun."""
    _programs[among] = _programs.get(among, 0) + 1
    try:
        yield
    except BaseException:
        _programs[among] -= 1
        raise


def begin_exchange(name: str) -> int:
    """An exchange begins: the how many-th of its name it is."""
    number = _exchanges[name] = _exchanges.get(name, 0) + 1
    return number


@contextmanager
def exchanging(name: str, number: int, among: str) -> Iterator[None]:
    """While this process waits in an exchange among these processes."""
    _waits.append((name, number, among))
    try:
        yield
    finally:
        _waits.remove((name, number, among))


def begun() -> Begun:
    """What this process has begun."""
    return {"programs": dict(_programs), "waits": list(_waits)}


def waits_in_vain(other: Begun, own: int) -> str | None:
    """In words, what another process has begun with this one (its number: `own`), which has not, and will not any more; None if there is nothing."""
    for among, count in other["programs"].items():
        mine = _programs.get(among, 0)
        if count > mine and _is_among(own, among):
            return f"a program with collectives, its number {count}, and there were {mine} here"
    for name, number, among in other["waits"]:
        if number > _exchanges.get(name, 0) and _is_among(own, among):
            return f"{name!r}, for the {_ordinal(number)} time, and here it was called {_times(_exchanges.get(name, 0))}"
    return None


def _is_among(own: int, among: str) -> bool:
    return among == ALL or str(own) in among.split(",")


def _ordinal(number: int) -> str:
    ending = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"


def _times(number: int) -> str:
    return {0: "never", 1: "once"}.get(number, f"{number} times")
