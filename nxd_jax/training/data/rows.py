"""Rows of a set as tensors, with checks that say which row does not fit."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch.utils.data import Dataset

from nxd_jax.training.data.making import COLUMNS

logger = logging.getLogger("nxd_jax")

IGNORED = -100
"""A label that no loss is taken of."""


@dataclass(frozen=True)
class Rules:
    """What rows must be like.

    source: the set, as errors name it (`data.train_dir=/sets/wiki`). width: ids in a row (None: as the first row of a batch). vocab_size: ids are below it
    (None: not checked). vocabulary: where that number is from.

    Models attend to all tokens before one, whatever the mask says (as in the original). Warns, once for each set, of rows in which that matters.
    """

    source: str
    width: int | None = None
    vocab_size: int | None = None
    vocabulary: str = "vocab_size"
    _said: set[str] = field(default_factory=set, compare=False, repr=False)

    def tensors(self, table: pa.Table, numbers: Sequence[int]) -> dict[str, torch.Tensor]:
        """The columns input_ids, attention_mask (ones if it is missing) and labels (the ids if they are missing) as int64 [rows, width].

        numbers: of the rows, for errors. Raises ValueError for a row of another width, one without ids, an id that the vocabulary does not have.
        """
        ids = self._values(table.column(COLUMNS[0]), COLUMNS[0], self.width, numbers)
        self._check_ids(ids, COLUMNS[0], numbers)
        mask = self._or(np.ones_like(ids), table, "attention_mask", numbers)
        labels = self._or(ids, table, "labels", numbers)
        self._check_ids(labels, "labels", numbers)
        self._check_mask(mask, labels, numbers)
        return {name: torch.from_numpy(values) for name, values in zip(COLUMNS, (ids, mask, labels), strict=True)}

    def _check_mask(self, mask: np.ndarray, labels: np.ndarray, numbers: Sequence[int]) -> None:
        """Say what of a mask has no effect."""
        hidden = mask == 0
        if not hidden.any():
            return
        left = hidden[:, :-1] & (mask[:, 1:] != 0)
        self._warn(
            left,
            numbers,
            "has attention_mask 0 before a 1: masks have no effect, and the tokens that follow attend to what is masked. Fill rows at the end",
        )
        self._warn(
            hidden & (labels != IGNORED),
            numbers,
            f"has labels where attention_mask is 0, and they count in the loss: give them the label {IGNORED}",
        )

    def _warn(self, wrong: np.ndarray, numbers: Sequence[int], text: str) -> None:
        """Once for each text."""
        rows = np.flatnonzero(wrong.any(axis=1))
        if len(rows) and text not in self._said:
            self._said.add(text)
            logger.warning("row %d of %s %s (said once)", numbers[int(rows[0])], self.source, text)

    def _or(self, otherwise: np.ndarray, table: pa.Table, name: str, numbers: Sequence[int]) -> np.ndarray:
        """A column, and something else where there is none."""
        found = otherwise.copy()
        if name in table.column_names:
            column = table.column(name)
            there = np.flatnonzero(column.is_valid().to_numpy())
            found[there] = self._values(column.take(pa.array(there)), name, otherwise.shape[1], [numbers[int(k)] for k in there])
        return found

    def _values(self, chunks: pa.ChunkedArray, name: str, width: int | None, numbers: Sequence[int]) -> np.ndarray:
        column = chunks.combine_chunks()
        if isinstance(column, pa.ChunkedArray):
            column = pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)
        widths = pc.list_value_length(column).to_numpy(zero_copy_only=False)
        wanted = width if width is not None else (int(widths[0]) if len(widths) and widths[0] == widths[0] else 0)
        wrong = np.flatnonzero(widths != wanted)
        if len(wrong):
            has = widths[wrong[0]]
            raise ValueError(self._width_text(numbers[wrong[0]], name, 0 if has != has else int(has), wanted))
        flat = pc.list_flatten(column)
        if flat.null_count:
            raise ValueError(
                f"{self.source}: {name} of row {numbers[int(np.flatnonzero(flat.is_null())[0]) // wanted]} holds null in place of a number"
            )
        return flat.to_numpy(zero_copy_only=False).astype(np.int64).reshape(len(widths), wanted)

    def _width_text(self, row: int, name: str, has: int, wanted: int) -> str:
        said = f"model.encoder_seq_length={wanted}" if self.width is not None else f"the rows before it have {wanted}"
        return (
            f"row {row} of {self.source} has {has} numbers in {name}, and {said}: all rows must be as wide. `nxdt-data make --length {wanted}` cuts text "
            "into such rows"
            + (f"; or set model.encoder_seq_length={has}, if all rows have that width" if self.width is not None and has else "")
        )

    def _check_ids(self, values: np.ndarray, name: str, numbers: Sequence[int]) -> None:
        if self.vocab_size is None or not values.size or (values.min() >= 0 and values.max() < self.vocab_size):
            return
        wrong = (values < 0) | (values >= self.vocab_size)
        if name == "labels":
            wrong &= values != IGNORED
        if not wrong.any():
            return
        row, place = np.argwhere(wrong)[0]
        found = int(values[row, place])
        advice = f", or give the model a vocabulary of at least {found + 1}" if found > 0 else ""
        raise ValueError(
            f"row {numbers[row]} of {self.source} has {found} in {name} (place {place}), and {self.vocabulary} is {self.vocab_size}: ids are 0 to "
            f"{self.vocab_size - 1}{f', labels also {IGNORED}' if name == 'labels' else ''}. Tokenise with the model's own tokenizer{advice}"
        )


class Rows(Dataset[dict[str, torch.Tensor]]):
    """The rows of a set, checked when they are read."""

    def __init__(self, data: datasets.Dataset, rules: Rules):
        self.data = data
        self.rules = rules
        self.source = rules.source
        self._read = data.select_columns([c for c in data.column_names if c in COLUMNS]).with_format("arrow")

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[dict[str, torch.Tensor]]:
        """What torch's loaders ask for: the rows of a batch at once."""
        return split(self.rules.tensors(self._read[indices], indices))


def split(columns: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """Columns [rows, ...] as a list of rows."""
    count = len(next(iter(columns.values())))
    return [{name: values[k] for name, values in columns.items()} for k in range(count)]


def is_list_of_ints(feature: Any) -> bool:
    """Whether a column of `datasets` holds lists of whole numbers."""
    inner = getattr(feature, "feature", None)
    return isinstance(inner, datasets.Value) and ("int" in inner.dtype)


def too_few(source: str, rows: int, needed: int) -> str:
    """What is said of a set that is smaller than one step."""
    count = "no rows" if rows == 0 else f"{rows} row{'' if rows == 1 else 's'}"
    smaller = f", or set data.global_batch_size to {rows} at most" if rows else ""
    return f"{source} has {count}, and a step needs data.global_batch_size={needed}: give more rows{smaller}"
