"""Writes Megatron's indexed sets. What a killed run leaves is never taken for a set: the index comes last."""

from __future__ import annotations

import array
import os
from types import TracebackType
from typing import Any

import numpy as np

from nxd_jax.training.data import partials
from nxd_jax.training.data.megatron.indexed import DTYPES, HEADER, MAGIC, VERSION, data_path, index_path

_CODES = {np.dtype(kind): code for code, kind in DTYPES.items()}


def smallest_dtype(vocab_size: int | None) -> np.dtype[Any]:
    """uint16 for vocabularies below 65500 tokens, else int32, as the original's tools choose."""
    return np.dtype(np.uint16 if vocab_size is not None and vocab_size < 65500 else np.int32)


class IndexedWriter:
    """`MMapIndexedDatasetBuilder`: writes `PREFIX.bin` and `PREFIX.idx`, which are there under their names when the block ends without an error.

    dtype: of tokens, one of `indexed.DTYPES`. `sequences` and `tokens` count what was added.

    Raises FileExistsError for a set that is there (unless overwrite), ValueError for another dtype.
    """

    def __init__(self, prefix: str | os.PathLike[str], dtype: Any = np.int32, overwrite: bool = False):
        self.prefix = os.fspath(prefix)
        self.dtype = np.dtype(dtype)
        if self.dtype not in _CODES:
            raise ValueError(f"tokens of {self.dtype} cannot be written; dtypes are {', '.join(t.__name__ for t in DTYPES.values())}")
        there = [str(path) for path in (data_path(prefix), index_path(prefix)) if path.exists()]
        if there and not overwrite:
            raise FileExistsError(f"{there[0]} is there already; choose another prefix, or pass --overwrite")
        self._data, self._index = partials.partial(data_path(prefix)), partials.partial(index_path(prefix))
        self._data.parent.mkdir(parents=True, exist_ok=True)
        for path in (data_path(prefix), index_path(prefix)):
            partials.remove_old(path)
        self._file = self._data.open("wb")
        self._sizes = array.array("i")
        self._bounds = array.array("q", [0])
        self.tokens = 0

    @property
    def sequences(self) -> int:
        """Added so far."""
        return len(self._sizes)

    @property
    def documents(self) -> int:
        """Ended so far."""
        return len(self._bounds) - 1

    def add(self, tokens: Any) -> None:
        """`add_item`: one sequence. Raises ValueError for tokens that the dtype cannot hold."""
        values = np.asarray(tokens)
        stored = values.astype(self.dtype)
        if values.size and not np.array_equal(stored, values):
            wrong = values[stored != values].reshape(-1)[0]
            raise ValueError(f"token {wrong} does not fit {self.dtype}: give a larger dtype")
        self._file.write(stored.astype(self.dtype.newbyteorder("<")).tobytes())
        self._sizes.append(values.size)
        self.tokens += values.size

    def end_document(self) -> None:
        """The sequences since the last call are a document."""
        self._bounds.append(len(self._sizes))

    def __enter__(self) -> IndexedWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._file.close()
        try:
            if kind is None:
                self._write_index()
                index_path(self.prefix).unlink(missing_ok=True)  # the old one does not fit the new data
                os.replace(self._data, data_path(self.prefix))
                os.replace(self._index, index_path(self.prefix))
        finally:
            partials.remove(self._data)
            partials.remove(self._index)

    def _write_index(self) -> None:
        sizes = np.frombuffer(self._sizes, np.intc) if self._sizes else np.zeros(0, np.intc)
        ends = np.cumsum(sizes, dtype=np.int64)
        with self._index.open("wb") as file:
            file.write(HEADER.pack(MAGIC, VERSION, _CODES[self.dtype], len(sizes), len(self._bounds)))
            file.write(sizes.astype("<i4").tobytes())
            file.write(((ends - sizes) * self.dtype.itemsize).astype("<i8").tobytes())
            file.write(np.frombuffer(self._bounds, np.int64).astype("<i8").tobytes())
