"""Which tokens are sample k: the three maps of Megatron's GPT datasets.

All documents of all epochs lie one behind the other in the order of the documents map. Sample k begins with token k * seq_length of that stream and has
`seq_length + extra` tokens, so with extra = 1 two neighbours share a token. The shuffle map says which of these samples comes as number k.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

BLOCK = 1 << 22
"""Documents that are looked at together."""


@dataclass(frozen=True)
class Wanted:
    """Samples of a range of documents.

    sizes: tokens of each document of the file. first, last: the range, last not in it. samples: how many are needed at least. extra: 1 if a sample has one
    token more than `seq_length` (for labels), else 0. drop_last: leave out what is left at the end and fills no sample.

    Raises ValueError for a range without tokens.
    """

    sizes: np.ndarray
    first: int
    last: int
    samples: int
    seq_length: int
    seed: int
    extra: int = 1
    drop_last: bool = True

    def __post_init__(self) -> None:
        if self.seq_length < 1 or self.samples < 0:
            raise ValueError(f"{self.samples} samples of {self.seq_length} tokens cannot be made")
        if not self.tokens:
            raise ValueError(f"documents {self.first} to {self.last - 1} have no tokens")

    @cached_property
    def tokens(self) -> int:
        """Of an epoch."""
        return int(self.sizes[self.first : self.last].sum(dtype=np.int64))

    @cached_property
    def epochs(self) -> int:
        """As few as give the samples."""
        return max(1, -(-(self.samples * self.seq_length + self.extra) // self.tokens))

    @cached_property
    def length(self) -> int:
        """Samples that there are."""
        usable = self.epochs * self.tokens - self.extra
        return usable // self.seq_length if self.drop_last else -(-usable // self.seq_length)

    @property
    def before_last(self) -> int:
        """Samples of all epochs but the last one."""
        return ((self.epochs - 1) * self.tokens - self.extra) // self.seq_length

    @cached_property
    def separate(self) -> bool:
        """Whether the last epoch is shuffled by itself: if less than 80 % of its samples are needed. (The original's `separate_last_epoch`.)"""
        of_one = (self.tokens - self.extra) // self.seq_length
        return self.epochs > 1 and self.samples - self.before_last < int(0.80 * of_one)

    @property
    def documents(self) -> int:
        """Of all epochs."""
        return self.epochs * (self.last - self.first)


@dataclass(frozen=True)
class Maps:
    """documents [epochs * documents]: document numbers. samples [length + 1, 2]: place in `documents` and token within it at which each sample begins. shuffle
    [length]: numbers of samples."""

    documents: np.ndarray
    samples: np.ndarray
    shuffle: np.ndarray


def build(wanted: Wanted) -> Maps:
    """The maps; random draws are those of NumPy's `RandomState(seed)`, documents first, then samples."""
    source = np.random.RandomState(wanted.seed)
    documents = _documents(wanted, source)
    samples = np.concatenate([rows for _, rows in sample_blocks(wanted, documents)])
    return Maps(documents, samples, _shuffle(wanted, source))


def _documents(wanted: Wanted, source: np.random.RandomState) -> np.ndarray:
    kind = np.int32 if wanted.last < np.iinfo(np.int32).max else np.int64
    once = np.arange(wanted.first, wanted.last, dtype=kind)
    parts = [np.tile(once, wanted.epochs - 1), once] if wanted.separate else [np.tile(once, wanted.epochs)]
    for part in parts:
        source.shuffle(part)
    return np.concatenate(parts)


def sample_blocks(wanted: Wanted, documents: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """The samples map, some rows at a time, each time with the number of the first one."""
    kind = np.int32 if wanted.documents < np.iinfo(np.int32).max else np.int64
    extra, length = wanted.extra, wanted.length
    yield 0, np.zeros((1, 2), kind)
    row, before = 1, 0
    for begin in range(0, len(documents), BLOCK):
        sizes = wanted.sizes[documents[begin : begin + BLOCK]].astype(np.int64)
        ends = before + np.cumsum(sizes)
        until = min(length, (int(ends[-1]) - extra) // wanted.seq_length)
        if until >= row:
            # the token that a sample shares with the next one, or its last one
            places = np.arange(row, until + 1, dtype=np.int64) * wanted.seq_length + extra - 1
            found = np.searchsorted(ends, places, "right")
            yield row, np.stack([begin + found, places - (ends - sizes)[found] + 1 - extra], axis=1).astype(kind)
            row = until + 1
        before = int(ends[-1])
    if row == length:  # not drop_last: the last sample is short
        yield row, np.array([[len(documents) - 1, int(wanted.sizes[documents[-1]]) - extra]], kind)


def _shuffle(wanted: Wanted, source: np.random.RandomState) -> np.ndarray:
    kind = np.uint32 if wanted.length < np.iinfo(np.uint32).max - 1 else np.int64
    order = np.arange(wanted.length, dtype=kind)
    bound = wanted.before_last if wanted.separate else wanted.length
    source.shuffle(order[:bound])
    if bound < wanted.length:
        source.shuffle(order[bound:])
    return order


def misfit(wanted: Wanted, maps: Maps) -> str | None:
    """Why maps are not those of these documents; None if they are, up to their random order."""
    documents, samples, shuffle = maps.documents, maps.samples, maps.shuffle
    shapes = (documents.shape, samples.shape, shuffle.shape)
    expected = ((wanted.documents,), (wanted.length + 1, 2), (wanted.length,))
    if shapes != expected:
        return f"they have the shapes {_words(shapes)}, and {_words(expected)} are needed"
    if any(not np.issubdtype(found.dtype, np.integer) for found in (documents, samples, shuffle)):
        return "they hold other things than whole numbers"
    if not _each_as_often(documents, wanted.first, wanted.last, wanted.epochs):
        return f"they are of other documents than {wanted.first} to {wanted.last - 1}"
    for row, rows in sample_blocks(wanted, documents):
        if not np.array_equal(samples[row : row + len(rows)], rows):
            return "documents have other lengths now, or samples were cut by another rule (data.no_seqlen_plus_one_input_tokens)"
    if not _each_as_often(shuffle, 0, wanted.length, 1):
        return "samples are missing in the order"
    return None


def _words(shapes: tuple[tuple[int, ...], ...]) -> str:
    return ", ".join("x".join(map(str, shape)) for shape in shapes)


def _each_as_often(values: np.ndarray, first: int, last: int, times: int) -> bool:
    counts = np.zeros(last - first, np.int64)
    for begin in range(0, len(values), BLOCK):
        block = values[begin : begin + BLOCK].astype(np.int64) - first
        if len(block) and (block.min() < 0 or block.max() >= len(counts)):
            return False
        counts += np.bincount(block, minlength=len(counts))
    return bool((counts == times).all())
