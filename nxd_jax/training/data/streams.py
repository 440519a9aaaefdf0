"""Rows that are read from front to back, for sets that are too large to be opened or tokenised before training begins (`data.streaming: true`)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch

from nxd_jax.training.data import making, records
from nxd_jax.training.data.blocks import Blocks
from nxd_jax.training.data.rows import Rules, split, too_few


class Stream:
    """Rows from front to back. tables(): the rows, anew from the first one at each call. rules: what rows must be like. passing: the pass that began last."""

    def __init__(self, tables: Callable[[], Iterable[pa.Table]], rules: Rules):
        self._tables = tables
        self.rules = rules
        self.passing: Pass | None = None

    def begin(self, samples: int, batch_size: int) -> None:
        """A pass begins behind the first `samples` rows, in batches of `batch_size` rows."""
        self.passing = Pass(self._from(samples), batch_size, self.rules.source if samples == 0 else None)

    def _from(self, samples: int) -> Iterator[dict[str, torch.Tensor]]:
        number = 0
        for table in self._tables():
            if number + table.num_rows > samples:
                part = table.slice(max(samples - number, 0))
                first = number + table.num_rows - part.num_rows
                yield from split(self.rules.tensors(part, range(first, first + part.num_rows)))
            number += table.num_rows


class Pass:
    """A pass over rows in batches. source: the name of a set whose first row is the first one here."""

    def __init__(self, rows: Iterator[dict[str, torch.Tensor]], batch_size: int, source: str | None):
        self._rows = rows
        self._size = batch_size
        self._source = source
        self._number = -1
        self._batch: list[dict[str, torch.Tensor]] | None = []

    def batch(self, number: int) -> list[dict[str, torch.Tensor]] | None:
        """Global batch `number`, None at the end. Ranks ask in step: for the batch of the last call, or the next one.

        Raises ValueError for a set that is shorter than one batch.
        """
        if number == self._number + 1:
            batch = list(itertools.islice(self._rows, self._size))
            if len(batch) < self._size and number == 0 and self._source is not None:
                raise ValueError(too_few(self._source, len(batch), self._size))
            self._number = number
            self._batch = batch if len(batch) == self._size else None
        assert number == self._number, (number, self._number)
        return self._batch


def of_ids(paths: list[Path]) -> Callable[[], Iterator[pa.Table]]:
    """The rows of files and folders with the column input_ids."""
    return lambda: (t for path in paths for t in records.tables(path, making.COLUMNS, rows=64))


def of_text(paths: list[Path], column: str, tokenizer: Any, length: int) -> Callable[[], Iterator[pa.Table]]:
    """Text, tokenised while it is read, in rows of one length."""
    return lambda: (making.table(ids) for ids in Blocks(records.documents(paths, column), tokenizer, length))
