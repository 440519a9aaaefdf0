"""The rows that `python -m tests.opinfo` prints."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

STATUSES = ("skip", "pass", "fallback", "fail")
"""From best to worst; an entry is as good as its worst case, and skipped if all cases are."""


@dataclass(frozen=True)
class Row:
    """One entry of a database in one case (a dtype, say) and how it went."""

    database: str
    name: str
    case: str
    status: str
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.database:7}{self.name:50} {self.case:9} {self.status:9} {self.reason}".rstrip()

    @classmethod
    def parse(cls, line: str) -> Row | None:
        """The row that printed as `line`; None for other lines."""
        fields = line.split(None, 4)
        return cls(*fields) if len(fields) > 3 and fields[3] in STATUSES else None


def of_entries(rows: Iterable[Row]) -> dict[tuple[str, str], str]:
    """The status of each entry over all its cases."""
    worst: dict[tuple[str, str], str] = {}
    for row in rows:
        key = row.database, row.name
        worst[key] = max(worst.get(key, "skip"), row.status, key=STATUSES.index)
    return worst


def summary(rows: Iterable[Row]) -> str:
    """One line per database: how many entries passed, fell back, failed and were skipped."""
    rows = list(rows)
    entries = of_entries(rows)
    lines = []
    for database in dict.fromkeys(row.database for row in rows):
        count = Counter(status for (of, _), status in entries.items() if of == database)
        total = count.total()
        share = 100 * count["pass"] / total
        lines.append(f"{database}: {total} entries: " + ", ".join(f"{count[s]} {s}" for s in STATUSES[::-1]) + f" ({share:.1f}% pass)")
    return "\n".join(lines)
