"""Rows of files and folders, from front to back: Arrow, parquet, JSON lines, plain text, also gzipped."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet

TEXT = "text"
"""The column of a plain text file."""

ROWS = 1000
"""Rows that are read at a time, at most."""

SUFFIXES = (".jsonl", ".json", ".parquet", ".arrow", ".txt")
"""Of files that are read; a .gz behind .jsonl, .json and .txt is taken off."""


def is_saved(path: Path) -> bool:
    """Whether a folder was written by `Dataset.save_to_disk`, or by a DatasetDict's."""
    return (path / "state.json").is_file() or (path / "dataset_dict.json").is_file()


class NoRowsError(ValueError):
    """A folder that `datasets` wrote without any row."""


def files(paths: Sequence[str | Path]) -> list[Path]:
    """The files to read, and folders of `save_to_disk` as they are: what is named, and in folders all files of a known kind, sorted by their paths.

    Raises FileNotFoundError for what is not there, ValueError for files of another kind and folders without any.
    """
    found: list[Path] = []
    for path in map(Path, paths):
        if not path.exists():
            raise FileNotFoundError(f"there is no file or folder {path}")
        if path.is_file():
            kind(path)
            found.append(path)
        elif is_saved(path):
            found.append(path)
        else:
            inside = sorted(f for f in path.rglob("*") if f.is_file() and _suffix(f) in SUFFIXES)
            if not inside:
                raise ValueError(
                    f"there is nothing to read in {path}: it has no files named {', '.join(SUFFIXES)} (.txt, .json and .jsonl also with .gz)"
                )
            found += inside
    return found


def kind(path: Path) -> str:
    """How a file is read: its suffix without .gz. Raises ValueError for others than `SUFFIXES`."""
    suffix = _suffix(path)
    if suffix not in SUFFIXES:
        raise ValueError(
            f"{path} cannot be read by its name, which must end in {', '.join(SUFFIXES)} (.txt, .json and .jsonl also with .gz behind it)"
        )
    return suffix


def _suffix(path: Path) -> str:
    plain = path.with_suffix("") if path.suffix == ".gz" else path
    return plain.suffix if path.suffix != ".gz" or plain.suffix in (".jsonl", ".json", ".txt") else path.suffix


def tables(path: Path, columns: Sequence[str] | None = None, rows: int = ROWS) -> Iterator[pa.Table]:
    """A file's rows, at most `rows` at a time. columns: those to read, if they are there (None: all).

    Raises ValueError for what is no JSON, no UTF-8, no parquet.
    """
    if path.is_dir():
        yield from _of_dataset(saved(path), columns, rows)
        return
    suffix = kind(path)
    try:
        if suffix == ".arrow":
            yield from _of_dataset(datasets.Dataset.from_file(str(path)), columns, rows)
        elif suffix == ".parquet":
            with pyarrow.parquet.ParquetFile(path) as file:
                wanted = None if columns is None else [c for c in file.schema_arrow.names if c in columns]
                for batch in file.iter_batches(rows, columns=wanted):
                    yield pa.Table.from_batches([batch])
        elif suffix == ".txt":
            with _opened(path) as file:
                text = file.read()
            yield pa.table({TEXT: [text]})
        else:
            yield from _of_json(path, columns, rows)
    except (pa.ArrowInvalid, UnicodeDecodeError, EOFError, gzip.BadGzipFile) as error:
        raise ValueError(f"{path} cannot be read as {suffix}: {error}") from error


def load(path: str | Path) -> Any:
    """What `save_to_disk` wrote: a Dataset or a DatasetDict. Raises NoRowsError for one without rows that `datasets` itself cannot load."""
    try:
        return datasets.load_from_disk(str(path))
    except IndexError as error:
        raise NoRowsError(f"{path} has no rows") from error


def saved(path: Path, split: str | None = None) -> datasets.Dataset:
    """A folder of `save_to_disk`. split: of a DatasetDict; its only one, or "train", if it is None. Raises ValueError for a split that is not there."""
    found = load(path)
    if isinstance(found, datasets.DatasetDict):
        name = split or ("train" if "train" in found else next(iter(found), "")) if split or "train" in found or len(found) == 1 else None
        if name not in found:
            raise ValueError(
                f"{path} holds the splits {', '.join(found) or '(none)'}{f', and none named {split}' if split else ''}: name one of their folders"
            )
        return found[name]
    return found


def documents(paths: Sequence[str | Path], column: str = TEXT, sample_by: str = "document") -> Iterator[str]:
    """The texts of files and folders, in order. column: where they are in other files than .txt.

    sample_by: what of a .txt file is a text: the whole "document", a "paragraph" (blank lines between), a "line". Texts without any letter are left out.

    Raises ValueError for a column that is not there or has no text.
    """
    for path in files(paths):
        text_file = path.is_file() and kind(path) == ".txt"
        name = TEXT if text_file else column
        for table in tables(path, [name]):
            if name not in table.column_names:
                raise ValueError(f"{path} has no column {name!r}; it has {', '.join(columns_of(path)) or 'none'}: say which holds the text")
            for text in table.column(name).to_pylist():
                if text is not None and not isinstance(text, str):
                    raise ValueError(f"{path}: column {name!r} holds {str(text)[:40]!r}, which is no text")
                yield from (t for t in _parts(text or "", sample_by if text_file else "document") if t.strip())


def columns_of(path: Path) -> list[str]:
    """The columns of a file or folder of `save_to_disk`, as its first rows have them."""
    return next((list(t.column_names) for t in tables(path, rows=8)), [])


def _parts(text: str, sample_by: str) -> list[str]:
    if sample_by == "document":
        return [text]
    return text.splitlines() if sample_by == "line" else text.split("\n\n")


def _of_dataset(data: datasets.Dataset, columns: Sequence[str] | None, rows: int) -> Iterator[pa.Table]:
    if columns is not None:
        data = data.select_columns([c for c in data.column_names if c in columns])
    data = data.with_format("arrow")
    for begin in range(0, len(data), rows):
        yield data[begin : begin + rows]


def _of_json(path: Path, columns: Sequence[str] | None, rows: int) -> Iterator[pa.Table]:
    """JSON lines, or one list of objects."""
    gathered: list[dict[str, Any]] = []
    names: dict[str, None] = {}
    for number, row in _objects(path):
        if not isinstance(row, dict):
            raise ValueError(f'{path}:{number} must be an object such as {{"text": "..."}}, not {str(row)[:40]}')
        names.update(dict.fromkeys(row))
        gathered.append(row)
        if len(gathered) == rows:
            yield _table(gathered, names, columns)
            gathered = []
    if gathered:
        yield _table(gathered, names, columns)


def _table(rows: list[dict[str, Any]], names: dict[str, None], columns: Sequence[str] | None) -> pa.Table:
    wanted = [n for n in names if columns is None or n in columns]
    return pa.table({n: [row.get(n) for row in rows] for n in wanted})


def _objects(path: Path) -> Iterator[tuple[int, Any]]:
    """Each with the number of its line, or its place in a list."""
    with _opened(path) as file:
        line = next((text for text in iter(file.readline, "") if text.strip()), "")
        file.seek(0)
        if line.lstrip().startswith("["):
            yield from enumerate(_json(path, 1, file.read()), 1)
            return
        if line.strip() == "{":
            raise ValueError(f"{path} must have an object in each line (JSON lines), or be one list of objects")
        for number, text in enumerate(file, 1):
            if text.strip():
                yield number, _json(path, number, text)


def _json(path: Path, number: int, text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}:{number} is no JSON: {error}") from error


def _opened(path: Path) -> Any:
    return gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8")
