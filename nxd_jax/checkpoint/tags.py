"""A directory of checkpoints: one folder for each tag, marked when begun (`checkpoint`) and when complete (`done`). The newest complete one counts.

A tag is written in place if it is new. One that is complete already is replaced by a folder written beside it, so at every moment there is a
complete one. What a crash leaves behind has no `done` and is never chosen.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

from nxd_jax.checkpoint import savers
from nxd_jax.checkpoint.savers import BEGUN

DONE = "done"
_NEW, _OLD = ".new", ".old"


def completed(root: Path) -> list[str]:
    """Complete tags, oldest first, by when they were completed."""
    found = []
    for folder in _folders(root):
        try:
            found.append(((folder / DONE).stat().st_mtime_ns, folder.name))
        except FileNotFoundError:
            continue
    return [name for _, name in sorted(found)]


def unfinished(root: Path) -> list[str]:
    """Tags that were begun and not completed, oldest first."""
    found = [(f.stat().st_mtime_ns, f.name) for f in _folders(root) if (f / BEGUN).exists() and not (f / DONE).exists()]
    return [name for _, name in sorted(found)]


def _folders(root: Path) -> list[Path]:
    return [f for f in root.iterdir() if f.is_dir()] if root.is_dir() else []


def check(tag: str) -> None:
    """Raise ValueError for a tag that is no name of a folder."""
    if not tag or tag in (".", "..") or tag.startswith("/") or ".." in Path(tag).parts or tag.endswith((_NEW, _OLD)):
        raise ValueError(f"tag={tag!r} cannot name a checkpoint: give a name such as 'step_100'")


def begin(root: Path, tag: str) -> Path:
    """The folder to write a tag in, empty but for its mark. Raises FileExistsError if another process is writing it."""
    folder = root / tag
    if (folder / DONE).exists():
        folder = folder.with_name(folder.name + _NEW)
    savers.check_free(folder)
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    _mark(folder / BEGUN, savers.claim(folder))
    return folder


def commit(root: Path, tag: str, folder: Path) -> None:
    """Mark what was written as complete, in the place of an earlier one of this name. Raises FileExistsError if another process began it again meanwhile."""
    savers.check_mine(folder)
    _sync_folder(folder)
    _mark(folder / DONE)
    final = root / tag
    if folder != final:
        old = final.with_name(final.name + _OLD)
        if old.exists():
            remove(old)
        os.replace(final, old)
        os.replace(folder, final)
        remove(old)
    _sync_folder(root)
    savers.release(folder)
    with contextlib.suppress(OSError):
        (final / BEGUN).write_text("1")  # nobody asks any more who began it


def retain(root: Path, count: int | None) -> list[str]:
    """Keep the `count` newest complete tags (None or -1: all), and remove unfinished ones begun before the newest complete one that nobody is writing. Returns
    what went."""
    if count is None or count < 0:
        return []
    done = completed(root)
    gone = done[: max(len(done) - count, 0)]
    if done:
        latest = (root / done[-1] / DONE).stat().st_mtime_ns
        gone += [t for t in unfinished(root) if (root / t).stat().st_mtime_ns < latest and savers.owner(root / t) is None]
    for tag in gone:
        remove(root / tag)
    return gone


def remove(folder: Path) -> None:
    """Remove a tag: first its mark, so that half of one is never taken for a whole."""
    (folder / DONE).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def _mark(path: Path, text: str = "1") -> None:
    with open(path, "w") as f:
        f.write(text)
        f.flush()
        os.fsync(f.fileno())


def _sync_folder(folder: Path) -> None:
    """Make names in a folder durable, where the system can."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(handle)
    except OSError:
        pass
    finally:
        os.close(handle)
