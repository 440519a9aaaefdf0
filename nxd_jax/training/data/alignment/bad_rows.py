"""Rows that cannot be trained on: all are named at once, and left out only if the configuration says so."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import TypeVar

logger = logging.getLogger("nxd_jax")

T = TypeVar("T")

CHOICES = ("error", "drop")
"""Of `data.bad_rows`."""
LONG = ("error", "drop", "cut")
"""Of `data.long_rows`."""

_SHOWN = 5


class NoAnswerError(ValueError):
    """A row that has nothing to learn in it."""


class BadRows:
    """What is wrong with rows of a set. source: the set, as errors name it. what: they are ("cannot be trained on"). advice: the setting to turn."""

    def __init__(self, source: str, drop: bool, what: str, advice: str):
        self.source = source
        self.drop = drop
        self.what = what
        self.advice = advice
        self.found: dict[int, str] = {}

    def add(self, row: int, text: str) -> None:
        """A row, by its number in the set, and what is wrong with it."""
        self.found[row] = text

    def usable(self, rows: Iterable[int], make: Callable[[int], T]) -> dict[int, T]:
        """What is made of rows, by their numbers, without those of which nothing can be (NoAnswerError): they are noted."""
        found: dict[int, T] = {}
        for row in rows:
            try:
                found[row] = make(row)
            except NoAnswerError as error:
                self.add(row, str(error))
        return found

    def finish(self, rows: int) -> None:
        """Warn of what was left out of so many rows. Raises ValueError for bad rows that are not to be left out."""
        if not self.found:
            return
        shown = "; ".join(f"row {row}: {text}" for row, text in list(self.found.items())[:_SHOWN])
        more = f"; and {len(self.found) - _SHOWN} more" if len(self.found) > _SHOWN else ""
        said = f"{self.source}: {len(self.found)} of {rows} rows {self.what}: {shown}{more}"
        if not self.drop:
            raise ValueError(f"{said}. {self.advice}")
        logger.warning("%s. They are left out", said)


def unusable(source: str, choice: str | None) -> BadRows:
    """For rows without what is learned. choice: `data.bad_rows`."""
    return BadRows(
        source,
        _checked("bad_rows", choice, CHOICES) == "drop",
        "cannot be trained on",
        "Mend them, or leave them out with data.bad_rows=drop",
    )


def too_long(source: str, choice: str | None, length: int) -> BadRows:
    """For rows of more tokens than a sequence has. choice: `data.long_rows`."""
    return BadRows(
        source,
        _checked("long_rows", choice, LONG) != "error",
        f"have more than data.seq_length={length} tokens",
        "Leave them out with data.long_rows=drop, cut their end off with data.long_rows=cut, or set a larger data.seq_length (and model.encoder_seq_length)",
    )


def _checked(key: str, choice: str | None, allowed: tuple[str, ...]) -> str:
    found = "error" if choice is None else str(choice)
    if found not in allowed:
        raise ValueError(f"data.{key}: {choice!r} must be {', '.join(allowed[:-1])} or {allowed[-1]}")
    return found
