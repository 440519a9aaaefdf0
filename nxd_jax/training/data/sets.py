"""Sets as `data.train_dir` and its like name them: folders of `save_to_disk`, and files or folders of JSON lines, parquet, Arrow and text."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import filelock
import pyarrow as pa
from omegaconf import DictConfig

from nxd_jax.training.data import making, records, streams, tokenizing
from nxd_jax.training.data.rows import is_list_of_ints, too_few

logger = logging.getLogger("nxd_jax")

SPLITS = {"train": ("train",), "val": ("validation", "valid", "val", "dev"), "test": ("test",)}
"""Names of the splits of a DatasetDict, by what they are for."""

HOW = "`nxdt-data make --text FILES --tokenizer FOLDER --length N --out FOLDER` makes a set of text"


@dataclass(frozen=True)
class Wanted:
    """Which set: key (`data.train_dir`), its value (a path or a list of them), use ("train", "val", "test").

    batch: rows that a step needs. length: ids in a row, for text. tokenizer: for text; column: of the text.
    """

    key: str
    value: Any
    use: str = "train"
    batch: int = 1
    length: int | None = None
    tokenizer: Any = None
    column: str = records.TEXT

    @property
    def paths(self) -> list[str]:
        said = [self.value] if isinstance(self.value, (str, os.PathLike)) else list(self.value)
        return [os.path.expandvars(os.path.expanduser(str(path))) for path in said]

    @property
    def source(self) -> str:
        """As errors name it."""
        return f"{self.key}={', '.join(self.paths)}"


def open_set(wanted: Wanted) -> datasets.Dataset:
    """All rows, with at least the column input_ids. Text is tokenised once and kept beside the other files that `datasets` keeps.

    Raises FileNotFoundError for what is not there; ValueError for what holds neither ids nor text, text without a tokenizer, splits of which none is meant.
    """
    if _is_remote(wanted):
        found = [_of_dict(_load(path, wanted), path, wanted) for path in wanted.paths]
    else:
        found = [part for place in _places(wanted) for part in _open(place, wanted)]
    for part in found:
        _check_types(part, wanted)
    return found[0] if len(found) == 1 else datasets.concatenate_datasets([_ids_only(part) for part in found])


def open_stream(wanted: Wanted) -> Callable[[], Iterator[pa.Table]]:
    """The same, to be read from front to back: a function that begins anew at each call. Text is tokenised while it is read."""
    if _is_remote(wanted):
        raise ValueError(f"{wanted.source}: data.streaming reads files and folders of this machine; set data.streaming=false")
    places = [place for path in _places(wanted) for place in records.files([path])]
    places = [_split_folder(place, wanted) for place in places]
    if _has_ids(places, wanted):
        return streams.of_ids(places)
    tokenizer, length = _for_text(wanted, places[0])
    return streams.of_text(places, wanted.column, tokenizer, length)


def vocab_size_of(cfg: DictConfig) -> int | None:
    """vocab_size in `model.model_config` (config.json, or its folder), None if it cannot be read: the model module says what is wrong with it."""
    said = cfg.model.get("model_config")
    if said is None:
        return None
    path = Path(os.path.expandvars(os.path.expanduser(str(said))))
    try:
        return int(json.loads((path / "config.json" if path.is_dir() else path).read_text())["vocab_size"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _is_remote(wanted: Wanted) -> bool:
    return all("://" in path for path in wanted.paths)


def _places(wanted: Wanted) -> list[Path]:
    """What is named, if it is there."""
    for path in map(Path, wanted.paths):
        if not path.exists():
            raise FileNotFoundError(
                f"{wanted.source}: there is no {path}. It names a folder that datasets' save_to_disk wrote, or files with the column input_ids (.jsonl, "
                f".parquet). {HOW}"
            )
    return [Path(path) for path in wanted.paths]


def _open(place: Path, wanted: Wanted) -> list[datasets.Dataset]:
    """A folder of `save_to_disk`, or the files in a folder, kind by kind."""
    if place.is_dir() and records.is_saved(place):
        return [_with_ids(_of_dict(_load(place, wanted), str(place), wanted), [_split_folder(place, wanted)], wanted)]
    try:
        found = records.files([place])
    except ValueError as error:
        raise ValueError(f"{wanted.source}: {error}") from error
    groups: dict[str, list[Path]] = {}
    for file in found:
        groups.setdefault("saved" if file.is_dir() else records.kind(file), []).append(file)
    return [_open_files(kind, files, wanted) for kind, files in groups.items()]


_BUILDERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".arrow": "arrow"}


def _open_files(kind: str, files: list[Path], wanted: Wanted) -> datasets.Dataset:
    if kind == "saved":
        return datasets.concatenate_datasets([_with_ids(records.saved(f), [f], wanted) for f in files])
    if kind == ".txt" or not _has_ids(files, wanted):
        return _tokenised(files, wanted)
    try:
        with quiet():
            return datasets.load_dataset(_BUILDERS[kind], data_files=[str(f) for f in files], split="train")
    except datasets.exceptions.DatasetGenerationError as error:
        raise ValueError(f"{wanted.source}: {', '.join(f.name for f in files[:4])} cannot be read: {error.__cause__ or error}") from error


def _load(path: str | Path, wanted: Wanted) -> Any:
    try:
        return records.load(path)
    except records.NoRowsError:
        raise ValueError(too_few(wanted.source, 0, wanted.batch)) from None


def _of_dict(found: Any, path: str, wanted: Wanted) -> datasets.Dataset:
    """The split that is meant."""
    if not isinstance(found, datasets.DatasetDict):
        return found
    name = _split(list(found), path, wanted)
    logger.info("%s=%s holds the splits %s: %s is taken", wanted.key, path, ", ".join(found), name)
    return found[name]


def _split(names: Sequence[str], path: str, wanted: Wanted) -> str:
    for name in SPLITS[wanted.use]:
        if name in names:
            return name
    if len(names) == 1:
        return names[0]
    raise ValueError(
        f"{wanted.key}={path} holds the splits {', '.join(names) or '(none)'}, and none is named {' or '.join(SPLITS[wanted.use])}: name the folder of one of "
        f"them, such as {wanted.key}={path}/{names[0] if names else 'train'}"
    )


def _split_folder(place: Path, wanted: Wanted) -> Path:
    if place.is_dir() and (place / "dataset_dict.json").is_file():
        return place / _split(list(_load(place, wanted)), str(place), wanted)
    return place


def _with_ids(data: datasets.Dataset, places: list[Path], wanted: Wanted) -> datasets.Dataset:
    """The set itself, or its text tokenised."""
    if making.COLUMNS[0] in data.column_names:
        return data
    _has_ids(places, wanted)
    return _tokenised(places, wanted)


def _check_types(data: datasets.Dataset, wanted: Wanted) -> None:
    if making.COLUMNS[0] not in data.column_names:
        raise ValueError(
            f"{wanted.source} has the columns {', '.join(data.column_names)}, and must have input_ids (lists of token ids). {HOW}"
        )
    for name in making.COLUMNS:
        if name in data.column_names and not is_list_of_ints(data.features[name]):
            raise ValueError(f"{wanted.source}: column {name} holds {data.features[name]}, and must hold lists of whole numbers")


def _has_ids(places: list[Path], wanted: Wanted) -> bool:
    """Whether rows hold ids, not text. Raises ValueError for neither, and for no rows."""
    place, columns = next(((place, found) for place in places if (found := records.columns_of(place))), (None, []))
    if place is None:
        raise ValueError(too_few(wanted.source, 0, wanted.batch))
    if making.COLUMNS[0] in columns:
        return True
    if wanted.column not in columns:
        raise ValueError(
            f"{wanted.source}: {place} has the columns {', '.join(columns)}, and must have input_ids (lists of token ids), or the text column "
            f"{wanted.column!r} (data.text_column names another one) with data.tokenizer"
        )
    return False


def _for_text(wanted: Wanted, place: Path) -> tuple[Any, int]:
    if wanted.tokenizer is None or wanted.length is None:
        raise ValueError(
            f"{wanted.source}: {place} holds text, and data.tokenizer is not set: name a tokenizer's folder, or make a set before. {HOW}"
        )
    return wanted.tokenizer, wanted.length


def _tokenised(places: list[Path], wanted: Wanted) -> datasets.Dataset:
    """Text in rows of one length. One process makes the set, others wait for it; a later training with the same text finds it."""
    tokenizer, length = _for_text(wanted, places[0])
    said = [
        f"{p} {p.stat().st_size} {p.stat().st_mtime_ns}"
        for place in places
        for p in (sorted(place.rglob("*")) if place.is_dir() else [place])
    ]
    name = hashlib.sha256("\n".join([*said, wanted.column, str(length), tokenizing.identity(tokenizer)]).encode()).hexdigest()[:24]
    folder = Path(datasets.config.HF_DATASETS_CACHE) / "nxdt" / name
    folder.parent.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(f"{folder}.lock"):
        if not folder.exists():
            logger.info("%s: tokenising text into rows of %d (kept in %s)", wanted.source, length, folder)
            try:
                making.make(records.documents(places, wanted.column), tokenizer, length, folder)
            except ValueError as error:
                raise ValueError(f"{wanted.source}: {error}") from error
    return records.load(folder)


def _ids_only(data: datasets.Dataset) -> datasets.Dataset:
    """With the columns that all parts of a set can have, in one type."""
    kept = data.select_columns([c for c in making.COLUMNS if c in data.column_names])
    kinds = {name: datasets.Sequence(datasets.Value("int64")) for name in kept.column_names}
    with quiet():
        return kept.cast(datasets.Features(kinds))


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without the progress bars of `datasets`."""
    were_on = datasets.utils.logging.is_progress_bar_enabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if were_on:
            datasets.enable_progress_bars()
