"""A save of one tag, now or in the background, and where a complete tag is found."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from nxd_jax.checkpoint import original, original_writing, random_states, savers, tags, writing
from nxd_jax.checkpoint.storage import BaseCheckpointStorage
from nxd_jax.checkpoint.worker import Worker
from torch_bridge.mesh import processes, world
from torch_bridge.runtime import executor

logger = logging.getLogger("nxd_jax")

_worker = Worker()
_PAUSE = 1.0
"""Seconds that a save in the background lets training go first."""


class Last(NamedTuple):
    """Where the last save went, and whether the first one was in the background."""

    storage: BaseCheckpointStorage
    in_background: bool


_last: Last | None = None


def last() -> Last | None:
    """The last save of this process."""
    return _last


def _remember(storage: BaseCheckpointStorage, in_background: bool) -> None:
    global _last
    _last = Last(storage, in_background if _last is None else _last.in_background)


def submit(task: Callable[[], Any]) -> None:
    """Do something in the background, after the saves there."""
    _worker.submit(task)


def wait() -> None:
    """Until everything in the background is done. Raises what went wrong in it."""
    _worker.wait()


# -- saving ------------------------------------------------------------------------------------------


class Save:
    """One save: what to write, held as it is now. `items`: folders of arrays by name; `files`: whole files by name; `own`: what each process keeps for itself,
    beside its random states. All processes make and start it."""

    def __init__(self, storage: BaseCheckpointStorage, tag: str, keep: int | None = None):
        self.storage = storage
        self.tag = tag
        self.keep = keep
        self.items: dict[str, writing.Item | original_writing.RankFiles] = {}
        self.files: dict[str, bytes] = {}
        self.own: dict[str, Any] = {}
        self.random = b""

    def start(self, in_background: bool = False) -> None:
        """Add the random states, then write: now, or in the background."""
        self.random = writing.pickled({**random_states.current(), **self.own})
        for item in self.items.values():
            if isinstance(item, writing.Item):
                item.index["processes"] = world.process_count()
        _remember(self.storage, in_background)
        if not in_background:
            self.run()
            return
        for item in self.items.values():
            item.hold()
        _worker.submit(self.run, pause=_PAUSE)

    def run(self) -> None:
        """Write, mark as complete, remove old tags."""
        started = time.perf_counter()
        first = world.process_index() == 0
        size = sum(item.bytes for item in self.items.values())
        folder = savers.begin(self.storage, self.tag, size)
        with savers.writing(folder, self.storage.dirname(), first, size):
            for part, item in self.items.items():
                item.write(folder / part)
            if first:
                for file, data in self.files.items():
                    writing.write_bytes(folder / file, data)
                (folder / writing.RANDOM).mkdir(exist_ok=True)
            processes.barrier("save_checkpoint written")
            writing.write_bytes(folder / writing.RANDOM / f"{world.process_index():05d}.pt", self.random)
            processes.barrier("save_checkpoint random")
            if first:
                self.storage.commit(self.tag, folder)
        self.items.clear()
        if first:
            self.storage.retain(self.keep)
            logger.info("saved %s to %s: %.1f MB in %.1f s", self.tag, self.storage.dirname(), size / 1e6, time.perf_counter() - started)
        processes.barrier("save_checkpoint done")


def next_tag(storage: BaseCheckpointStorage) -> str:
    numbers = [int(t[5:]) for t in storage.completed_tags() if t.startswith("save_") and t[5:].isdigit()]
    return f"save_{max(numbers, default=0) + 1:06d}"


def then(task: Callable[[], Any]) -> None:
    """Do something once the saves in the background are done: at once if there are none."""
    if _worker.busy:
        _worker.submit(task)
    else:
        task()


# -- loading -----------------------------------------------------------------------------------------


def fetch(storage: BaseCheckpointStorage, tag: object = None) -> Path:
    """A local folder with the files of a complete tag (None: the newest), once saves in the background are done. All processes call it.

    Raises RuntimeError if there is no complete tag, FileNotFoundError if not this one.
    """
    _worker.wait()
    executor.sync()
    return _fetched(storage, _chosen(storage, tag))


def _chosen(storage: BaseCheckpointStorage, tag: object) -> str:
    found = storage.completed_tags()
    if tag is None or str(tag) == "":
        if not found:
            raise RuntimeError(f"Error: no checkpoint under directory {storage.dirname()} (a tag without its `done` file does not count)")
        return found[-1]
    name = str(tag)
    for choice in (name, f"{name}.new", f"{name}.old"):  # what a crash while a tag was replaced left
        if choice in found or (
            "/" in name and storage.file_exists(f"{choice}/{tags.DONE}")
        ):  # a tag in a folder of its own counts if it is named
            return choice
    if original.is_older(storage.root / name):  # parallel_layers.save leaves no mark
        return name
    listed = ", ".join(found[-8:]) or "none"
    raise FileNotFoundError(f"{storage.dirname()} has no complete checkpoint {name!r}; complete ones are: {listed}")


def _fetched(storage: BaseCheckpointStorage, name: str) -> Path:
    if world.process_count() == 1:
        return storage.fetch(name)
    if world.process_index() == 0:
        found = str(storage.fetch(name))
        return Path(processes.exchange("load_checkpoint fetched", found.encode())[0].decode())
    return Path(processes.exchange("load_checkpoint fetched", b"")[0].decode())


def part(folder: Path, name: str, what: str) -> Path:
    path = folder / name
    if not path.exists():
        there = ", ".join(sorted(p.name for p in folder.iterdir()))
        raise FileNotFoundError(
            f"the checkpoint {folder} holds no {what}: there is no {name} among {there}. Do not pass {what}=, or load another tag"
        )
    return path


def restore_random(folder: Path) -> None:
    """Go on with the random numbers that came next when a checkpoint was saved."""
    random_states.restore(folder / writing.RANDOM)
