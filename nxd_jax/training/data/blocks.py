"""Text to rows of one length: token ids of all texts one behind the other, cut into blocks."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from nxd_jax.training.data import tokenizing

TEXTS = 1000
"""Texts that are tokenised together."""


class Blocks:
    """Iterates over arrays [rows, length] of int32. Counts `documents`, `tokens`, `rows`; `left_over`: tokens at the end that fill no row."""

    def __init__(self, documents: Iterable[str], tokenizer: Any, length: int):
        if length < 1:
            raise ValueError(f"the length of rows must be positive, not {length}")
        self._texts = documents
        self._tokenizer = tokenizer
        self.length = length
        self.documents = self.tokens = self.rows = self.left_over = 0

    def __iter__(self) -> Iterator[np.ndarray]:
        rest = np.zeros(0, np.int32)
        texts = iter(self._texts)
        while batch := list(itertools.islice(texts, TEXTS)):
            ids = [np.asarray(row, np.int32) for row in tokenizing.encode(self._tokenizer, batch)]
            self.documents += len(batch)
            self.tokens += sum(len(row) for row in ids)
            together = np.concatenate([rest, *ids])
            count = len(together) // self.length
            rest = together[count * self.length :]
            self.rows += count
            self.left_over = len(rest)
            if count:
                yield together[: count * self.length].reshape(count, self.length)
