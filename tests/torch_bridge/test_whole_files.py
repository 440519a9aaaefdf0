"""Files that are saved: whole or not at all, and why not."""

from __future__ import annotations

import contextlib
import errno
import gc
import io
import os
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch_xla.core.xla_model as xm

from tests.nxd_jax.faults import room
from torch_bridge.recorder import first_rank_files
from torch_bridge.runtime import whole_files


def test_a_file_that_was_there_keeps_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    whole_files.save({"x": 1}, path)
    path.chmod(0o640)
    (tmp_path / "link.pt").symlink_to(path)
    xm.save({"x": torch.ones(2).to("xla")}, str(tmp_path / "link.pt"))
    assert (tmp_path / "link.pt").is_symlink() and path.stat().st_mode & 0o777 == 0o640
    assert torch.load(path)["x"].tolist() == [1.0, 1.0] and sorted(os.listdir(tmp_path)) == ["a.pt", "link.pt"]


def test_what_cannot_be_saved_leaves_the_file_that_was_there(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    whole_files.save(1, path)
    with pytest.raises((AttributeError, TypeError)):
        whole_files.save(threading.Lock(), path)
    assert torch.load(path) == 1 and os.listdir(tmp_path) == ["a.pt"]


def test_files_without_a_name(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    xm.save(torch.ones(2).to("xla"), buffer)
    buffer.seek(0)
    assert torch.load(buffer).tolist() == [1.0, 1.0]
    xm.save(1, os.devnull)
    assert not os.path.isfile(os.devnull)


@pytest.fixture
def full(tmp_path: Path) -> Iterator[Path]:
    """A folder without room, with a file in it."""
    if not room.may_mount():
        pytest.skip("no small file system can be mounted here")
    folder = tmp_path / "full"
    with room.small(folder), contextlib.ExitStack() as block:
        block.callback(gc.collect)  # errors hold torch's writer, and it the file
        whole_files.save(1, folder / "a.pt")
        with pytest.raises(OSError, match="No space left"), (folder / "filler").open("wb", buffering=0) as file:
            while True:
                file.write(bytes(1 << 12))
        yield folder


@pytest.mark.parametrize("elements", [1, 1 << 16])
def test_no_space_left(full: Path, elements: int) -> None:
    """torch's own error is of a stream."""
    with pytest.raises(OSError, match=r"No space left on device: '.*a.pt.unfinished'") as found:
        xm.save(torch.ones(elements).to("xla"), full / "a.pt")
    assert found.value.errno == errno.ENOSPC and isinstance(found.value.__cause__, RuntimeError)
    assert torch.load(full / "a.pt") == 1 and sorted(os.listdir(full)) == ["a.pt", "filler"]


def test_errors_of_other_kinds_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*args: Any) -> None:
        raise RuntimeError("something else")

    monkeypatch.setattr(torch, "save", failing)
    with pytest.raises(RuntimeError, match="something else"):
        whole_files.save(1, tmp_path / "a.pt")
    assert os.listdir(tmp_path) == []


def test_one_rank_of_a_process_saves_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is said of other ranks."""
    monkeypatch.setattr(first_rank_files, "_noted", False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first_rank_files.note("a copy")
