"""What a check finds: errors, warnings and notes, each with its key and where that stands."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from nxd_jax.training.config.positions import Place, Positions

WIDTH = 120
"""Characters of a line of a report, at most."""


@dataclass(frozen=True)
class Problem:
    """level: "error", "warning" or "note". key: its dotted path. where: "conf.yaml:12:3", or "command line" for a key that an override set."""

    level: str
    key: str
    text: str
    where: str

    def lines(self) -> list[str]:
        """As a report shows it: where, key and text, broken into lines."""
        head = f"{self.where}: {self.key}: " if self.key else f"{self.where}: "
        return textwrap.wrap(head + self.text, WIDTH, initial_indent="  ", subsequent_indent="      ", break_on_hyphens=False)

    def __str__(self) -> str:
        return f"{self.where}: {self.key}: {self.text}" if self.key else f"{self.where}: {self.text}"


class Problems:
    """Collects what is found in one file. file: its name, as reports show it. overridden: keys that the command line set."""

    def __init__(self, file: str, positions: Positions, overrides: Sequence[str] = ()):
        self.file = file
        self.positions = positions
        self.overridden = {_key_of(word) for word in overrides}
        self.found: list[Problem] = []
        self._places: dict[str, Place | None] = {}

    def error(self, key: str, text: str) -> None:
        """Training would stop, or do something else than the file says."""
        self._add("error", key, text)

    def warn(self, key: str, text: str) -> None:
        """Training runs; perhaps not as it is meant."""
        self._add("warning", key, text)

    def note(self, key: str, text: str) -> None:
        """Good to know."""
        self._add("note", key, text)

    def of(self, level: str) -> list[Problem]:
        """All of a level, in the order of the file."""
        found = [p for p in self.found if p.level == level]
        return sorted(found, key=lambda p: (p.where == "command line", *self._order(p)))

    def _order(self, problem: Problem) -> tuple[int, int]:
        place = self._places.get(problem.key) or self.positions.of(problem.key)
        return (place.line, place.column) if place else (0, 0)

    def add_at(self, level: str, key: str, text: str, place: Place | None) -> None:
        """Add one that stands at a known place."""
        self._places.setdefault(key, place)
        where = self.file if place is None else f"{self.file}:{place.line}:{place.column}"
        self.found.append(Problem(level, key, text, where))

    def _add(self, level: str, key: str, text: str) -> None:
        if self._is_overridden(key):
            self.found.append(Problem(level, key, text, "command line"))
        else:
            self.add_at(level, key, text, self.positions.of(key))

    def _is_overridden(self, key: str) -> bool:
        return any(key == word or key.startswith(f"{word}.") for word in self.overridden)


def _key_of(word: str) -> str:
    """`+a.b=1` -> `a.b`."""
    return word.partition("=")[0].lstrip("+~").partition("@")[0]
