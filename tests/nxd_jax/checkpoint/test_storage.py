"""NxD's file operations of a checkpoint storage, on a disk and behind an address."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from nxd_jax.trainer import checkpoint_storage


@pytest.fixture(params=["disk", "memory"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> checkpoint_storage.BaseCheckpointStorage:
    return checkpoint_storage.create_checkpoint_storage(tmp_path if request.param == "disk" else f"memory://files/{tmp_path.name}")


def test_files_and_folders(storage: checkpoint_storage.BaseCheckpointStorage) -> None:
    assert storage.dirname() and not storage.dir_exists("a") and storage.list_checkpoint_tags() == []
    storage.create_dir("a/model")
    storage.create_dir("a/model")
    with pytest.raises(FileExistsError):
        storage.create_dir("a/model", exist_ok=False)
    storage.create_shared_dir("a/model/x.pt.tensors")
    storage.save_text("1", "a/checkpoint")
    storage.save_object({"k": 1}, "a/model/x.pt")
    storage.save_object([2], "a/model/x.pt.tensors/tensor_0.pt")
    assert storage.dir_exists("a/model") and not storage.dir_exists("a/checkpoint")
    assert storage.file_exists("a/model/x.pt") and not storage.file_exists("a/model")
    assert storage.load_object("a/model/x.pt", map_location="cpu") == {"k": 1}
    storage.remove_files(["a/model/x.pt", "a/none"])
    storage.remove_file("a/none")
    assert not storage.file_exists("a/model/x.pt")
    storage.remove_dirs(["a", "none"])
    assert not storage.dir_exists("a") and not storage.file_exists("a/checkpoint")


def test_what_is_where(storage: checkpoint_storage.BaseCheckpointStorage) -> None:
    for tag, marks in (("b", ("checkpoint", "done")), ("a", ("checkpoint",))):
        for mark in marks:
            storage.save_text("1", f"{tag}/{mark}")
        if isinstance(storage, checkpoint_storage.FilesysCheckpointStorage):
            os.utime(storage.root / tag / "checkpoint", (1, 1 if tag == "b" else 2))
    storage.save_text("", "a/model/r.pt.tensors/tensor_0.pt")
    storage.save_text("", "b/model/r.pt")
    storage.save_text("", "data/train.bin")
    assert storage.list_checkpoint_tags() == ["b", "a"] and storage.list_completed_checkpoint_tags() == ["b"]
    assert storage.is_checkpoint_xser("a") and not storage.is_checkpoint_xser("b")
    assert sorted(storage.find_files("*.pt", 3)) == ["a/model/r.pt.tensors/tensor_0.pt", "b/model/r.pt"]
    assert storage.find_files("*.pt", 2) == ["b/model/r.pt"] == storage.find_files("*.pt", 1, search_root="b")
    assert storage.find_files("checkpoint", 1, max_count=1, sort_by_mdate=True) == ["b/checkpoint"]
    assert storage.find_subdirs_contain_path("done", 1) == ["b"]
    assert storage.find_subdirs_contain_path(pattern="*.tensors", search_depth=1, search_root="a") == ["a/model"]


def test_addresses() -> None:
    parse = checkpoint_storage.S3CheckpointStorage.parse_path
    assert parse("s3://b/k/x") == ("b", "k/x") and parse("s3://b") == parse("s3://b/") == ("b", None)
    for wrong in ("s3://", "gs://b/k", "/tmp/x"):
        with pytest.raises(RuntimeError, match="is no address such as s3://bucket/path"):
            parse(wrong)
