"""`torch_xla.utils.gcsfs`: files in buckets, which are in memory here."""

from __future__ import annotations

import io
import pathlib
import sys
import time
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from torch_xla.utils import gcsfs


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Buckets in memory, in the place of Google's; `torch_xla.utils.gcsfs`."""

    class Buckets(MemoryFileSystem):
        protocol = ("gs",)
        store: ClassVar[dict[str, Any]] = {}
        pseudo_dirs: ClassVar[list[str]] = [""]

    monkeypatch.setattr(fsspec, "filesystem", lambda name: Buckets() if name == "gs" else pytest.fail(name))
    return gcsfs


def test_files_in_buckets(bucket: Any, tmp_path: pathlib.Path) -> None:
    bucket.write("gs://b/run/a.txt", "grün")
    bucket.write("gs://b/run/c.bin", io.BytesIO(b"123"))
    assert bucket.read("gs://b/run/a.txt").decode() == "grün" == bucket.open("gs://b/run/a.txt", encoding="utf-8").read()
    with bucket.open("gs://b/run/d/e.bin", "wb") as file:
        file.write(b"12")
    assert [(b.path, b.size, b.isdir) for b in bucket.list("gs://b/run")] == [
        ("gs://b/run/a.txt", 5, False),
        ("gs://b/run/c.bin", 3, False),
        ("gs://b/run/d", 0, True),
    ]
    assert [b.path for b in bucket.list("gs://b/run/*.bin")] == ["gs://b/run/c.bin"]
    found = bucket.stat("gs://b/run/c.bin")
    assert found.size == 3 and abs(found.mtime - time.time()) < 60
    bucket.remove("gs://b/run/c.bin")
    with pytest.raises(FileNotFoundError):
        bucket.stat("gs://b/run/c.bin")
    bucket.rmtree("gs://b/run")
    with pytest.raises(FileNotFoundError):
        bucket.list("gs://b/run")


def test_files_in_buckets_or_not(bucket: Any, tmp_path: pathlib.Path) -> None:
    for path in ("gs://b/x", str(tmp_path / "below" / "x")):
        bucket.generic_write("text", path, makedirs=True)
        assert bucket.generic_read(path) == b"text"
        with bucket.generic_open(path, "wb") as file:
            file.write(b"12")
        with bucket.generic_open(path) as file:
            assert file.read() == "12"
    with pytest.raises(ValueError, match=r"takes gs://BUCKET/PATH, got '/tmp/x': for local files there are generic_open"):
        bucket.read("/tmp/x")


def test_buckets_need_their_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(ImportError, match="gs://b/x: buckets of Google Cloud Storage need the package gcsfs: pip install gcsfs"):
        gcsfs.read("gs://b/x")
