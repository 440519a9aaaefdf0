"""Where checkpoints are: a directory, or an address such as s3://bucket/path that fsspec knows."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch

from nxd_jax.checkpoint import savers, tags
from nxd_jax.checkpoint.named_files import Entry, NamedFiles


class BaseCheckpointStorage(NamedFiles):
    """A directory of tags. `root`: a local directory to read and write; what is elsewhere is copied."""

    def __init__(self, dirname: str):
        self._dirname = dirname
        self.root = Path(dirname).absolute()

    def dirname(self) -> str:
        """The directory, as it was given."""
        return self._dirname

    # -- for saving and loading ---------------------------------------------------------------------

    def completed_tags(self) -> list[str]:
        """Complete tags, oldest first."""
        raise NotImplementedError

    def begin(self, tag: str) -> Path:
        """A local folder to write a tag in."""
        raise NotImplementedError

    def commit(self, tag: str, folder: Path) -> None:
        """Make what was written a complete tag."""
        raise NotImplementedError

    def retain(self, count: int | None) -> list[str]:
        """Keep the newest `count` complete tags; returns those that went."""
        raise NotImplementedError

    def fetch(self, tag: str) -> Path:
        """A local folder with a tag's files."""
        raise NotImplementedError

    def remove_tags(self, names: list[str]) -> None:
        """Remove tags."""
        raise NotImplementedError

    def list_completed_checkpoint_tags(self) -> list[str]:
        """NxD's name of `completed_tags`."""
        return self.completed_tags()


class FilesysCheckpointStorage(BaseCheckpointStorage):
    """A local (or mounted) directory."""

    def completed_tags(self) -> list[str]:
        return tags.completed(self.root)

    def begin(self, tag: str) -> Path:
        return tags.begin(self.root, tag)

    def commit(self, tag: str, folder: Path) -> None:
        tags.commit(self.root, tag, folder)

    def retain(self, count: int | None) -> list[str]:
        return tags.retain(self.root, count)

    def fetch(self, tag: str) -> Path:
        return self.root / tag

    def remove_tags(self, names: list[str]) -> None:
        for name in names:
            tags.remove(self.root / name)

    def entries(self, dirname: str = "") -> list[Entry]:
        folder = self.root / dirname
        found = sorted(folder.iterdir()) if folder.is_dir() else []
        return [Entry(p.name, p.is_dir(), p.stat().st_mtime_ns) for p in found]

    def dir_exists(self, dirname: str) -> bool:
        return (self.root / dirname).is_dir()

    def file_exists(self, filename: str) -> bool:
        return (self.root / filename).is_file()

    def create_dir(self, dirname: str, exist_ok: bool = True) -> None:
        (self.root / dirname).mkdir(parents=True, exist_ok=exist_ok)

    def remove_dir(self, dirname: str) -> None:
        if self.dir_exists(dirname):
            shutil.rmtree(self.root / dirname)

    def remove_file(self, filename: str) -> None:
        (self.root / filename).unlink(missing_ok=True)

    def save_text(self, text: str, filename: str) -> None:
        path = self.root / filename
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def save_object(self, obj: object, filename: str) -> None:
        path = self.root / filename
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(obj, path)

    def load_object(self, filename: str, map_location: Any = None) -> Any:
        return torch.load(self.root / filename, map_location=map_location, weights_only=False)


class FsspecCheckpointStorage(BaseCheckpointStorage):
    """An address that fsspec knows (s3:// needs the package s3fs, gs:// gcsfs). Tags are written to a local folder, then copied there, `done` last."""

    def __init__(self, dirname: str, options: dict[str, Any] | None = None):
        super().__init__(dirname)
        try:
            import fsspec
        except ImportError as error:
            raise ImportError(f"checkpoints at {dirname} need the package fsspec: pip install fsspec") from error
        try:
            self.files, self.base = fsspec.core.url_to_fs(dirname, **(options or {}))
        except (ImportError, ValueError) as error:
            raise type(error)(f"checkpoints at {dirname}: {error}") from error
        self.base = self.base.rstrip("/")
        key = hashlib.sha256(dirname.encode()).hexdigest()[:16]
        self.root = Path(os.environ.get("TMPDIR", tempfile.gettempdir())) / f"nxd_jax_checkpoints_{key}"

    def _there(self, *names: str) -> str:
        return "/".join([self.base, *names])

    def completed_tags(self) -> list[str]:
        if not self.files.exists(self.base):
            return []
        found = []
        for entry in self.files.ls(self.base, detail=True):
            name = entry["name"].rstrip("/").rpartition("/")[2]
            done = self._there(name, tags.DONE)
            if entry["type"] == "directory" and self.files.exists(done):
                found.append((self._completed_at(done), name))
        return [name for _, name in sorted(found)]

    def _completed_at(self, done: str) -> str:
        """When a tag was completed: what its mark says."""
        return self.files.cat_file(done).decode().partition(" ")[2]

    def begin(self, tag: str) -> Path:
        local = self.root / tag
        savers.check_free(local)
        if local.exists():
            shutil.rmtree(local)
        return tags.begin(self.root, tag)

    def commit(self, tag: str, folder: Path) -> None:
        import time

        savers.check_mine(folder)
        # As on a local disk: a complete tag of this name stays until the new one is there. Object stores cannot rename, so it goes under another name first.
        there = self._there(tag)
        if self.files.exists(f"{there}/{tags.DONE}"):
            self.files.rm_file(f"{there}/{tags.DONE}")
        if self.files.exists(there):
            self.files.rm(there, recursive=True)
        self.files.makedirs(there, exist_ok=True)
        for path in sorted(p for p in folder.rglob("*") if p.is_file()):
            target = f"{there}/{path.relative_to(folder).as_posix()}"
            self.files.makedirs(target.rpartition("/")[0], exist_ok=True)
            self.files.put_file(str(path), target)
        self.files.pipe_file(f"{there}/{tags.BEGUN}", b"1")
        self.files.pipe_file(f"{there}/{tags.DONE}", f"1 {time.time_ns():020d}".encode())
        shutil.rmtree(folder, ignore_errors=True)
        savers.release(folder)

    def retain(self, count: int | None) -> list[str]:
        if count is None or count < 0:
            return []
        gone = self.completed_tags()[:-count]
        self.remove_tags(gone)
        return gone

    def fetch(self, tag: str) -> Path:
        local = self.root / "fetched" / tag
        if local.exists():
            shutil.rmtree(local)
        local.mkdir(parents=True)
        there = self._there(tag)
        for name in self.files.find(there):
            target = local / name[len(there) :].lstrip("/")
            target.parent.mkdir(parents=True, exist_ok=True)
            self.files.get_file(name, str(target))
        return local

    def remove_tags(self, names: list[str]) -> None:
        for name in names:
            done = self._there(name, tags.DONE)
            if self.files.exists(done):
                self.files.rm_file(done)
            self.files.rm(self._there(name), recursive=True)

    def entries(self, dirname: str = "") -> list[Entry]:
        there = self._there(dirname) if dirname else self.base
        if not self.files.exists(there):
            return []
        found = []
        for entry in self.files.ls(there, detail=True):
            changed = next((entry[key] for key in ("LastModified", "mtime", "updated", "created") if entry.get(key)), "")
            found.append(Entry(entry["name"].rstrip("/").rpartition("/")[2], entry["type"] == "directory", str(changed)))
        return sorted(found)

    def dir_exists(self, dirname: str) -> bool:
        return bool(self.files.isdir(self._there(dirname)))

    def file_exists(self, filename: str) -> bool:
        return bool(self.files.isfile(self._there(filename)))

    def create_dir(self, dirname: str, exist_ok: bool = True) -> None:
        self.files.makedirs(self._there(dirname), exist_ok=exist_ok)

    def remove_dir(self, dirname: str) -> None:
        if self.dir_exists(dirname):
            self.files.rm(self._there(dirname), recursive=True)

    def remove_file(self, filename: str) -> None:
        if self.file_exists(filename):
            self.files.rm_file(self._there(filename))

    def save_text(self, text: str, filename: str) -> None:
        self.files.makedirs(self._there(filename).rpartition("/")[0], exist_ok=True)
        self.files.pipe_file(self._there(filename), text.encode())

    def save_object(self, obj: object, filename: str) -> None:
        self.files.makedirs(self._there(filename).rpartition("/")[0], exist_ok=True)
        with self.files.open(self._there(filename), "wb") as f:
            torch.save(obj, f)

    def load_object(self, filename: str, map_location: Any = None) -> Any:
        with self.files.open(self._there(filename), "rb") as f:
            return torch.load(f, map_location=map_location, weights_only=False)


class S3CheckpointStorage(FsspecCheckpointStorage):
    """`checkpoint_storage.S3CheckpointStorage`: s3://bucket/path, through the package s3fs."""

    @staticmethod
    def parse_path(s3_path: str) -> tuple[str, str | None]:
        """Bucket and path of an address, None for no path. Raises RuntimeError for an address that is none."""
        bucket, _, path = s3_path.removeprefix("s3://").partition("/")
        if not s3_path.startswith("s3://") or not bucket:
            raise RuntimeError(f"{s3_path!r} is no address such as s3://bucket/path")
        return bucket, path or None


def create_checkpoint_storage(dirname: object, crt_config: dict[str, Any] | None = None) -> BaseCheckpointStorage:
    """`checkpoint_storage.create_checkpoint_storage`: the storage of a path or an address. crt_config is accepted without effect."""
    name = os.fspath(dirname) if isinstance(dirname, (str, os.PathLike)) else None
    if not isinstance(name, str) or not name:
        raise TypeError(f"a checkpoint directory is a path or an address, got {dirname!r}")
    if name.startswith("s3://"):
        return S3CheckpointStorage(name)
    if "://" in name and not name.startswith("file://"):
        return FsspecCheckpointStorage(name)
    return FilesysCheckpointStorage(name.removeprefix("file://"))
