"""Names under which files and folders are written until they are whole."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from nxd_jax.top import records


def partial(path: Path) -> Path:
    """Where this process writes what is to be `path`: beside it."""
    return path.with_name(f".{path.name}.partial-{os.getpid()}")


def remove_old(path: Path) -> None:
    """Remove what killed processes left of `path`."""
    for old in path.parent.glob(f".{path.name}.partial-*") if path.parent.is_dir() else ():
        pid = old.name.rpartition("-")[2]
        if pid.isdigit() and not records.answers(int(pid)):
            remove(old)


def remove(path: Path) -> None:
    """Remove a file or folder, if it is there."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
