"""Rows of files and folders as dicts: JSON lines, JSON, parquet, Arrow, folders of `save_to_disk`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from nxd_jax.training.data import records

Row = dict[str, Any]


def read(paths: Sequence[str], source: str, first: int | None = None) -> list[Row]:
    """The rows, in order; only the `first` ones (`data.dev_choose_samples`), if it is given.

    source: as errors name the set. Raises FileNotFoundError and ValueError for what is not there, cannot be read, or has no rows.
    """
    try:
        found = list(itertools.islice(_rows(records.files(paths)), first))
    except (FileNotFoundError, ValueError) as error:
        raise type(error)(f"{source}: {error}") from error
    if not found:
        raise ValueError(f"{source} has no rows")
    return found


def _rows(places: Sequence[Path]) -> Iterator[Row]:
    for place in places:
        if place.is_file() and records.kind(place) == ".txt":
            raise ValueError(f"{place} is plain text; rows with columns are needed: .jsonl, .json, .parquet or .arrow")
        for table in records.tables(place):
            yield from table.to_pylist()


def columns(rows: Sequence[Row], wanted: Sequence[str], source: str, instead: str = "") -> None:
    """Raise ValueError for columns that the rows lack, naming those that they have. instead: what else would do."""
    missing = [name for name in wanted if name not in rows[0]]
    if missing:
        raise ValueError(
            f"{source} has no column {' and '.join(map(repr, missing))}; it has {', '.join(map(repr, rows[0]))}. Rows need "
            f"{' and '.join(map(repr, wanted))}{instead}"
        )
