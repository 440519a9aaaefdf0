"""`torch_xla.utils.gcsfs`: files in buckets of Google Cloud Storage, through fsspec (`pip install gcsfs`); the `generic_` functions take local paths, too."""

from __future__ import annotations

import builtins
import os
from typing import IO, Any, NamedTuple

import fsspec

CLOUD_STORAGE_PREFIX = "gs://"
"""What an address of a file in a bucket begins with."""


class GcsBlob(NamedTuple):
    """A file or folder. size: bytes. mtime: seconds since the epoch, 0.0 if it is not known."""

    path: str
    size: int
    mtime: float
    isdir: bool


def is_gcs_path(path: str) -> bool:
    """Whether a path is an address in a bucket."""
    return path.startswith(CLOUD_STORAGE_PREFIX)


def open(path: str, mode: str = "r", encoding: str | None = None) -> IO[Any]:
    """`gcsfs.open`: open "gs://BUCKET/PATH" as Python's `open` does. What is written is there when the file is closed."""
    found: IO[Any] = _files(path).open(path, mode, **({} if "b" in mode else {"encoding": encoding}))
    return found


def list(path: str) -> builtins.list[GcsBlob]:
    """`gcsfs.list`: what matches a pattern (`gs://bucket/run/*.pt`), what is in a folder, or a file itself."""
    files = _files(path)
    found = files.glob(path) if "*" in path else files.ls(path, detail=False)
    return [_blob(files, name) for name in sorted(found)]


def stat(path: str) -> GcsBlob:
    """`gcsfs.stat`: of a file or folder. Raises FileNotFoundError."""
    return _blob(_files(path), path)


def remove(path: str) -> None:
    """`gcsfs.remove`: a file. Raises FileNotFoundError."""
    _files(path).rm_file(path)


def rmtree(path: str) -> None:
    """`gcsfs.rmtree`: a folder with all that is in it, or the files that match a pattern."""
    files = _files(path)
    for name in files.glob(path) if "*" in path else [path]:
        files.rm(name, recursive=True)


def read(path: str) -> bytes:
    """`gcsfs.read`: a whole file."""
    found: bytes = _files(path).cat_file(path)
    return found


def write(path: str, content: str | bytes | IO[Any]) -> None:
    """`gcsfs.write`: a whole file, of text (UTF-8), bytes, or what a file object has."""
    data = content if isinstance(content, (str, bytes)) else content.read()
    _files(path).pipe_file(path, data.encode() if isinstance(data, str) else data)


def generic_open(path: str, mode: str = "r", encoding: str | None = None) -> IO[Any]:
    """`gcsfs.generic_open`: `open` for an address in a bucket, Python's for other paths."""
    return open(path, mode, encoding) if is_gcs_path(path) else builtins.open(path, mode, encoding=encoding)


def generic_read(path: str) -> bytes:
    """`gcsfs.generic_read`: a whole file, in a bucket or not."""
    with generic_open(path, "rb") as file:
        found: bytes = file.read()
        return found


def generic_write(output_string: str | bytes, output_path: str, makedirs: bool = False) -> None:
    """`gcsfs.generic_write`: a whole file, in a bucket or not. makedirs: make the local folder that it is in."""
    if makedirs and not is_gcs_path(output_path):
        os.makedirs(os.path.dirname(output_path) or ".", exist_ok=True)
    with generic_open(output_path, "wb") as file:
        file.write(output_string.encode() if isinstance(output_string, str) else output_string)


def _files(path: str) -> Any:
    """The file system of buckets. Raises ValueError for a path that is none of theirs, ImportError without the package gcsfs."""
    if not is_gcs_path(path):
        raise ValueError(
            f"torch_xla.utils.gcsfs takes gs://BUCKET/PATH, got {path!r}: for local files there are generic_open, generic_read and generic_write"
        )
    try:
        return fsspec.filesystem("gs")
    except ImportError as error:
        raise ImportError(f"{path}: buckets of Google Cloud Storage need the package gcsfs: pip install gcsfs") from error


def _blob(files: Any, name: str) -> GcsBlob:
    info = files.info(name)
    try:
        changed = files.modified(name).timestamp()
    except (NotImplementedError, KeyError, FileNotFoundError, IsADirectoryError):
        changed = 0.0  # a folder in a bucket has no time
    path = name if is_gcs_path(name) else CLOUD_STORAGE_PREFIX + name.lstrip("/")
    return GcsBlob(path, int(info.get("size") or 0), changed, info["type"] == "directory")
