"""Megatron's indexed sets: `PREFIX.bin` has the token ids of all sequences one behind the other, `PREFIX.idx` says where each begins.

An `.idx` file, little-endian: 9 bytes "MMIDIDX", version 1 (uint64), code of the dtype (uint8), number of sequences n (uint64), of document bounds d
(uint64), n sizes in tokens (int32), n addresses in bytes (int64), d numbers of the sequences at which documents begin, and their end (int64).
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")

DTYPES: dict[int, type[np.generic]] = {
    1: np.uint8,
    2: np.int8,
    3: np.int16,
    4: np.int32,
    5: np.int64,
    6: np.float64,
    7: np.float32,
    8: np.uint16,
}
"""By their codes. (NeMo's own builder wrote code 7 for float64; the addresses tell.)"""

_OTHERS = {
    b"TNTIDX\x00\x00": "Megatron's older kind (data_impl lazy or cached)",
    b"MMIDRET\x00": "an index for retrieval (data_impl retmmap)",
}

BLOCK = 1 << 22
"""Sequences that are looked at together."""


def index_path(prefix: str | os.PathLike[str]) -> Path:
    """`PREFIX.idx`."""
    return Path(f"{os.fspath(prefix)}.idx")


def data_path(prefix: str | os.PathLike[str]) -> Path:
    """`PREFIX.bin`."""
    return Path(f"{os.fspath(prefix)}.bin")


class IndexedSet:
    """`MMapIndexedDataset(prefix)`: a set whose files are mapped to memory; both are looked at as a whole before, the tokens themselves are not.

    Attributes: `prefix`; `sizes`, tokens of each sequence, int32 [n]; `pointers`, where it begins, in bytes, int64 [n]; `documents`, int64 [d], bounds of
    documents in sequences; `dtype` of tokens; `tokens`, how many there are. (A set made without --split-sentences has one sequence for each document.)

    Raises FileNotFoundError for a file that is not there, ValueError for one that is no index, is damaged, or does not belong to the other.
    """

    def __init__(self, prefix: str | os.PathLike[str]):
        self.prefix = os.fspath(prefix)
        index, data = index_path(prefix), data_path(prefix)
        _check_there(self.prefix, index, data)
        header = _read_header(index)
        code, count, bounds = header
        raw = np.memmap(index, np.uint8, "r")
        at = HEADER.size
        self.sizes: np.ndarray = np.ndarray(count, "<i4", raw, at)
        self.pointers: np.ndarray = np.ndarray(count, "<i8", raw, at + 4 * count)
        self.documents: np.ndarray = np.ndarray(bounds, "<i8", raw, at + 12 * count)
        self.dtype = _dtype(code, self.sizes, self.pointers)
        self.tokens = _check_layout(index, data, self)
        self._data: np.ndarray = np.memmap(data, np.uint8, "r") if data.stat().st_size else np.zeros(0, np.uint8)

    def __len__(self) -> int:
        """Sequences."""
        return len(self.sizes)

    def __getitem__(self, number: int) -> np.ndarray:
        """All tokens of a sequence. Raises IndexError for one that is not there."""
        return self.get(number)

    def get(self, number: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        """Tokens of a sequence from `offset` on, `length` of them (None: all), as they lie in the file."""
        size = int(self.sizes[number])
        length = size - offset if length is None else length
        if not 0 <= offset <= offset + length <= size:
            raise IndexError(f"{self.prefix}: sequence {number} has {size} tokens, and {length} from {offset} on were asked for")
        begin = int(self.pointers[number]) + offset * self.dtype.itemsize
        return np.frombuffer(self._data, self.dtype, length, begin) if length else np.zeros(0, self.dtype)

    @property
    def stream(self) -> np.ndarray:
        """All tokens in the order of the file, mapped."""
        return self._data.view(self.dtype)

    def blocks(self, tokens: int = 1 << 24) -> Iterator[np.ndarray]:
        """The stream, so many tokens at a time."""
        for begin in range(0, self.tokens, tokens):
            yield self.stream[begin : begin + tokens]

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.prefix,)


def _check_there(prefix: str, index: Path, data: Path) -> None:
    missing = [str(path) for path in (index, data) if not path.is_file()]
    if not missing:
        return
    hint = ""
    if prefix.endswith((".bin", ".idx")) and Path(prefix).is_file():
        hint = f". A prefix is the name without .bin and .idx: {prefix[:-4]}"
    raise FileNotFoundError(f"{prefix}: there is no {' and no '.join(missing)}{hint}")


def _read_header(index: Path) -> tuple[int, int, int]:
    """(code of the dtype, sequences, document bounds), once the file's own length fits them."""
    size = index.stat().st_size
    with index.open("rb") as file:
        head = file.read(HEADER.size)
    for magic, kind in _OTHERS.items():
        if head.startswith(magic):
            raise ValueError(f"{index} is {kind}, and only data_impl mmap is read: make the set again with `nxdt-data megatron`")
    if not head.startswith(MAGIC):
        raise ValueError(f"{index} is no index of a Megatron set: it begins with {head[:9]!r}, and must begin with {MAGIC!r}")
    if len(head) < HEADER.size:
        raise ValueError(f"{index} is damaged: it ends after {size} bytes, within the header of {HEADER.size}")
    _, version, code, count, bounds = HEADER.unpack(head)
    if version != VERSION:
        raise ValueError(f"{index} is of version {version}; only version {VERSION} is known")
    if code not in DTYPES:
        raise ValueError(f"{index} has the dtype code {code}; known are {', '.join(f'{c} ({t.__name__})' for c, t in DTYPES.items())}")
    wanted = HEADER.size + 12 * count + 8 * bounds
    if size == wanted + count and count:
        raise ValueError(f"{index} says the mode of each of its {count} sequences (a multimodal set); such sets are not read")
    if size != wanted:
        raise ValueError(
            f"{index} is damaged: with {count} sequences and {bounds} document bounds it must have {wanted} bytes, and has {size}"
        )
    return code, count, bounds


def _dtype(code: int, sizes: np.ndarray, pointers: np.ndarray) -> np.dtype[Any]:
    found = np.dtype(DTYPES[code]).newbyteorder("<")
    if code == 7 and len(sizes) > 1 and sizes[0] and pointers[1] - pointers[0] == 8 * sizes[0]:
        return np.dtype("<f8")
    return found


def _check_layout(index: Path, data: Path, found: IndexedSet) -> int:
    """The number of tokens; ValueError unless each sequence begins where the one before ends, and the last one ends with the data."""
    item, tokens = found.dtype.itemsize, 0
    for begin in range(0, len(found.sizes), BLOCK):
        sizes = found.sizes[begin : begin + BLOCK].astype(np.int64)
        wrong = np.flatnonzero(sizes < 0)
        if len(wrong):
            raise ValueError(f"{index} is damaged: sequence {begin + wrong[0]} has {sizes[wrong[0]]} tokens")
        ends = tokens + np.cumsum(sizes)
        wrong = np.flatnonzero(found.pointers[begin : begin + BLOCK] != (ends - sizes) * item)
        if len(wrong):
            raise ValueError(
                f"{index} is damaged: sequence {begin + wrong[0]} begins at byte {found.pointers[begin + wrong[0]]}, and the one before ends at "
                f"{int((ends - sizes)[wrong[0]]) * item}"
            )
        tokens = int(ends[-1])
    has = data.stat().st_size
    if has != tokens * item:
        raise ValueError(
            f"{index} does not fit {data}: {len(found.sizes):,} sequences of {tokens:,} tokens ({found.dtype.name}) take {tokens * item:,} bytes, and the "
            f"file has {has:,}. One of the two is of another set, or was not copied to its end"
        )
    bounds = found.documents
    if len(bounds) and (bounds[0] != 0 or bounds[-1] > len(found) or bool((np.diff(bounds) < 0).any())):
        raise ValueError(f"{index} is damaged: documents must begin with sequence 0, one behind the other, up to {len(found)}")
    return tokens
