"""The programs, by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

from tests.torch_bridge.replay_programs.running import FORMS, Run


@dataclasses.dataclass(frozen=True)
class Program:
    """category: what kind of state it is about; forms: how it can be run; careless: why a careless player gets it right too, if it does."""

    name: str
    category: str
    body: Callable[[Run], None]
    forms: tuple[str, ...] = FORMS
    careless: str = ""


PROGRAMS: dict[str, Program] = {}
"""Programs that must do as eager torch does, played or not."""
PLAYED: dict[str, Program] = {}
"""Programs that must do as eager torch does, and be played."""


def program(
    category: str, form: str = "", careless: str = "", played: bool = False
) -> Callable[[Callable[[Run], None]], Callable[[Run], None]]:
    """Put a program into a table. form: the only form that it has; careless: why even a careless player is right about it; played: it must be played."""

    def enter(body: Callable[[Run], None]) -> Callable[[Run], None]:
        assert body.__name__ not in PROGRAMS and body.__name__ not in PLAYED, f"two programs are named {body.__name__}"
        made = Program(body.__name__, category, body, (form,) if form else FORMS, careless)
        (PLAYED if played else PROGRAMS)[made.name] = made
        return body

    return enter


def cases(programs: Iterable[Program]) -> list[tuple[str, str]]:
    """Name and form of each."""
    return [(p.name, form) for p in programs for form in p.forms]
