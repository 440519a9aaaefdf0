"""What processes do together, counted: whether one that has done its work is waited for by another one, for ever.

Programs with collectives run in the same order in all processes that have a part in them, and so do exchanges through the store. So who is told that another
process has begun more of them, and will begin none any more, knows that the other one waits in vain.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypedDict

ALL = "all"
REMEMBERED = 64
"""Programs of which a process tells what collectives they had: more than it can be ahead of the others."""


class Begun(TypedDict):
    """What a process tells the others. programs: how many it has begun, and a word for the collectives of each of the last ones, by the processes that run them
    ("all", or "0,2"). waits: the exchanges in which it waits: a name, the how many-th of that name, and the processes that take part."""

    programs: dict[str, tuple[int, list[str]]]
    waits: list[tuple[str, int, str]]


class _Programs:
    """count: begun so far. last: words for the collectives of the last of them."""

    def __init__(self) -> None:
        self.count = 0
        self.last: deque[str] = deque(maxlen=REMEMBERED)


_programs: dict[str, _Programs] = {}
_exchanges: dict[str, int] = {}
_waits: list[tuple[str, int, str]] = []


def named(among: Sequence[int] | None) -> str:
    """The processes of a program or an exchange; None: all."""
    return ALL if among is None else ",".join(map(str, among))


@contextmanager
def running(among: str, collectives: str) -> Iterator[None]:
    """While a program with collectives (a word for them) among these processes is handed to the devices. One that cannot run has not begun."""
    own = _programs.setdefault(among, _Programs())
    own.count += 1
    own.last.append(collectives)
    try:
        yield
    except BaseException:
        own.count -= 1
        own.last.pop()
        raise


def count(among: str) -> int:
    """How many programs among these processes this one has begun."""
    found = _programs.get(among)
    return 0 if found is None else found.count


def ran(other: Begun, among: str, number: int) -> str | None:
    """The word for the collectives of another process's program of this number; "" if it has long forgotten, None if it has not begun that one."""
    total, last = other["programs"].get(among, (0, []))
    if total < number:
        return None
    back = total - number + 1
    return last[-back] if back <= len(last) else ""


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
    return {"programs": {among: (own.count, list(own.last)) for among, own in list(_programs.items())}, "waits": list(_waits)}


def waits_in_vain(other: Begun, own: int) -> str | None:
    """In words, what another process has begun with this one (its number: `own`), which has not, and will not any more; None if there is nothing."""
    for among, (total, _) in other["programs"].items():
        if total > count(among) and _is_among(own, among):
            return f"a program with collectives, its number {total}, and there were {count(among)} here"
    for name, number, among in other["waits"]:
        if number > _exchanges.get(name, 0) and _is_among(own, among):
            return f"{name!r}, for the {_ordinal(number)} time, and here it was called {_times(_exchanges.get(name, 0))}"
    return None


def crossed(one: Begun, number: int, other: Begun, other_number: int) -> bool:
    """Whether two processes wait for each other at different places, as far as they tell: each has begun something with the other that the other has not."""
    waits = _waits_alone(one, other, other_number), _waits_alone(other, one, number)
    return any(waits) and all(
        w or _is_ahead(*pair) for w, pair in zip(waits, ((one, other, other_number), (other, one, number)), strict=True)
    )


def _waits_alone(one: Begun, other: Begun, other_number: int) -> bool:
    """Whether one waits in an exchange with the other in which the other does not."""
    there = {tuple(wait) for wait in other["waits"]}
    return any(tuple(wait) not in there and _is_among(other_number, wait[2]) for wait in one["waits"])


def _is_ahead(one: Begun, other: Begun, other_number: int) -> bool:
    """Whether one has begun more programs with the other than the other has."""
    known = other["programs"]
    return any(total > known.get(among, (0, []))[0] and _is_among(other_number, among) for among, (total, _) in one["programs"].items())


def _is_among(own: int, among: str) -> bool:
    return among == ALL or str(own) in among.split(",")


def _ordinal(number: int) -> str:
    ending = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"


def _times(number: int) -> str:
    return {0: "never", 1: "once"}.get(number, f"{number} times")
