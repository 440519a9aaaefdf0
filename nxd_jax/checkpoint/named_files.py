"""NxD's file operations of a checkpoint storage: names are relative to its directory."""

from __future__ import annotations

import fnmatch
from typing import Any, NamedTuple

from nxd_jax.checkpoint.savers import BEGUN


class Entry(NamedTuple):
    """What is in a folder: its name there, whether it is a folder, when it was changed (anything that sorts)."""

    name: str
    is_folder: bool
    changed: Any


class NamedFiles:
    """What `BaseCheckpointStorage` and those that derive from it have in common."""

    # -- where the files are: for subclasses ----------------------------------------------------------

    def entries(self, dirname: str = "") -> list[Entry]:
        """What is in a folder; nothing in one that is not there."""
        raise NotImplementedError

    def dir_exists(self, dirname: str) -> bool:
        """Whether there is a folder of this name."""
        raise NotImplementedError

    def file_exists(self, filename: str) -> bool:
        """Whether there is a file of this name."""
        raise NotImplementedError

    def create_dir(self, dirname: str, exist_ok: bool = True) -> None:
        """Make a folder, and those that it is in. Raises FileExistsError for one that is there unless exist_ok."""
        raise NotImplementedError

    def remove_dir(self, dirname: str) -> None:
        """Remove a folder with all that is in it, if it is there."""
        raise NotImplementedError

    def remove_file(self, filename: str) -> None:
        """Remove a file, if it is there."""
        raise NotImplementedError

    def save_text(self, text: str, filename: str) -> None:
        """Write a text file."""
        raise NotImplementedError

    def save_object(self, obj: object, filename: str) -> None:
        """`torch.save`."""
        raise NotImplementedError

    def load_object(self, filename: str, map_location: Any = None) -> Any:
        """`torch.load`; runs the code that a file contains."""
        raise NotImplementedError

    # -- for all --------------------------------------------------------------------------------------

    def create_shared_dir(self, dirname: str, exist_ok: bool = True, process_group: Any = None) -> None:
        """Make a folder that several processes write in: the first that comes makes it."""
        self.create_dir(dirname, exist_ok or process_group is not None)

    def remove_dirs(self, dirnames: list[str]) -> None:
        """Remove folders."""
        for name in dirnames:
            self.remove_dir(name)

    def remove_files(self, filenames: list[str]) -> None:
        """Remove files."""
        for name in filenames:
            self.remove_file(name)

    def find_files(
        self, pattern: str, search_depth: int, search_root: str | None = None, max_count: int | None = None, sort_by_mdate: bool = False
    ) -> list[str]:
        """Files and folders whose own name matches, in `search_root` (the whole directory) and its folders, at most `search_depth` levels down.

        max_count: so many at most. sort_by_mdate: oldest first.
        """
        found: list[tuple[Any, str]] = []
        level = [search_root.strip("/") if search_root else ""]
        for _ in range(search_depth + 1):
            below: list[str] = []
            for folder in level:
                for entry in self.entries(folder):
                    name = f"{folder}/{entry.name}" if folder else entry.name
                    if fnmatch.fnmatch(entry.name, pattern):
                        found.append((entry.changed, name))
                    elif entry.is_folder:
                        below.append(name)
            level = below
        names = [name for _, name in (sorted(found) if sort_by_mdate else found)]
        return names[:max_count] if max_count else names

    def find_subdirs_contain_path(
        self, pattern: str, search_depth: int, search_root: str | None = None, max_count: int | None = None, sort_by_mdate: bool = False
    ) -> list[str]:
        """The folders of what `find_files` finds one level further down."""
        return [name.rpartition("/")[0] for name in self.find_files(pattern, search_depth + 1, search_root, max_count, sort_by_mdate)]

    def list_checkpoint_tags(self) -> list[str]:
        """Tags that were begun, complete or not, oldest first."""
        found = []
        for entry in self.entries():
            marks = [e.changed for e in self.entries(entry.name) if e.name == BEGUN] if entry.is_folder else []
            found += [(changed, entry.name) for changed in marks]
        return [name for _, name in sorted(found)]

    def is_checkpoint_xser(self, dirname: str) -> bool:
        """Whether a tag has tensors in files of their own (`use_xser`)."""
        return bool(self.find_files("*.tensors", 1, dirname, max_count=1))
