"""Examples in rows of one length: several in one row (`PackedRows`), or each alone (`PaddedRows`)."""

from __future__ import annotations

import numpy as np
import torch
from torch.utils.data import Dataset

from nxd_jax.training.data.alignment.examples import Examples
from nxd_jax.training.data.rows import IGNORED

PAD = 0
"""The id that fills rows; no loss is taken of it, and what it attends to counts nowhere."""


class PaddedRows(Dataset[dict[str, torch.Tensor]]):
    """Each example in a row of its own, filled at the end: input_ids, attention_mask (0 where filled) and labels (-100 where not learned), int64 [length]."""

    def __init__(self, examples: Examples, length: int):
        self.examples = examples
        self.length = length
        self.source = examples.source

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        begin, end = self.examples.bounds(index)
        return _row(self.examples.ids[begin:end], self.examples.learned[begin:end], self.length)


class PackedRows(Dataset[dict[str, torch.Tensor]]):
    """Examples one behind the other, in order, as many as fit in a row; the end of text follows each once more, and no loss is taken of that one.

    separate: rows have position_ids, which begin at 0 with each example (and with what fills the row), so that a model attends within one example alone.
    Without, tokens see the examples before theirs in the row, as in the original.

    An example needs a place for the end of text behind it, so one of exactly `length` tokens fits in no row: `Rules.length` is length - 1.
    """

    def __init__(self, examples: Examples, length: int, end_of_text: int, separate: bool = False):
        self.examples = examples
        self.length = length
        self.end_of_text = end_of_text
        self.separate = separate
        self.source = examples.source
        self.firsts = _firsts(examples.lengths() + 1, length)

    def __len__(self) -> int:
        return len(self.firsts) - 1

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids: list[np.ndarray] = []
        learned: list[np.ndarray] = []
        places: list[np.ndarray] = []
        for k in range(self.firsts[index], self.firsts[index + 1]):
            begin, end = self.examples.bounds(k)
            ids += [self.examples.ids[begin:end], np.asarray([self.end_of_text])]
            learned += [self.examples.learned[begin:end], np.asarray([False])]
            places.append(np.arange(end - begin + 1))
        row = _row(np.concatenate(ids), np.concatenate(learned), self.length)
        if self.separate:
            used = sum(map(len, places))
            row["position_ids"] = torch.from_numpy(np.concatenate([*places, np.arange(self.length - used)]).astype(np.int64))
        return row


def _firsts(lengths: np.ndarray, room: int) -> list[int]:
    """The first example of each row, and the number of examples."""
    found, used = [0] if len(lengths) else [], 0
    for k, n in enumerate(lengths.tolist()):
        if used + n > room:
            found.append(k)
            used = 0
        used += n
    return [*found, len(lengths)]


def _row(ids: np.ndarray, learned: np.ndarray, length: int) -> dict[str, torch.Tensor]:
    used = len(ids)
    row = {
        "input_ids": torch.full((length,), PAD),
        "attention_mask": torch.zeros(length, dtype=torch.int64),
        "labels": torch.full((length,), IGNORED),
    }
    values = torch.from_numpy(np.asarray(ids, np.int64))
    row["input_ids"][:used] = values
    row["attention_mask"][:used] = 1
    row["labels"][:used] = torch.where(torch.from_numpy(np.asarray(learned, bool)), values, IGNORED)
    return row
