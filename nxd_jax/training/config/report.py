"""What `nxdt-train --check` says of a configuration."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from nxd_jax.inspect import units
from nxd_jax.training.config import schedule
from nxd_jax.training.config.problems import WIDTH, Problem
from nxd_jax.training.config.schedule import Rates


@dataclass(frozen=True)
class Report:
    """file: its name. errors, warnings, notes: in the order of the file. not_trained: why this release does not train it, "" if it does. describe: gives
    the lines of what runs, which are worked out when they are shown. rates: the learning rates, None if they are not known.

    `str` is the whole text, `problems()` the part that says what is wrong, `ok` whether training can begin.
    """

    file: str
    errors: tuple[Problem, ...] = ()
    warnings: tuple[Problem, ...] = ()
    notes: tuple[Problem, ...] = ()
    not_trained: str = ""
    describe: Callable[[], Sequence[str]] = field(default=tuple, repr=False)
    rates: Rates | None = field(default=None, repr=False)

    @property
    def ok(self) -> bool:
        """Whether there are no errors, and this release trains it."""
        return not self.errors and not self.not_trained

    def problems(self) -> str:
        """The verdict, errors and warnings."""
        found = [self._verdict()]
        for title, group in (("errors", self.errors), ("warnings", self.warnings)):
            if group:
                found += ["", title, *(line for p in group for line in p.lines())]
        return "\n".join(found)

    def __str__(self) -> str:
        notes = ["", "notes", *(line for p in self.notes for line in p.lines())] if self.notes else []
        summary = list(self.describe())
        return "\n".join([self.problems(), *notes, *([""] if summary else []), *summary])

    def plot(self, path: str | os.PathLike[str]) -> Path:
        """Write a picture of the learning rates; its path. Raises ValueError if they are not known."""
        if self.rates is None:
            raise ValueError(f"{self.file}: the learning rates are not known; `str(report)` says what is wrong")
        return schedule.plot(self.rates, path, f"{self.file}: learning rate")

    def _verdict(self) -> str:
        counts = f"{units.many(len(self.errors), 'error')}, {units.many(len(self.warnings), 'warning')}"
        why = textwrap.wrap(self.not_trained, WIDTH, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)
        return "\n".join([f"{self.file}: {counts}", *why])
