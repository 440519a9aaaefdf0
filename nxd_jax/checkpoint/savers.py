"""Who is saving a tag: its mark names the process, so that two jobs that were given one folder do not write into each other's, and a save that fails says so
in a sentence."""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import logging
import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from nxd_jax.checkpoint import leftovers
from torch_bridge.mesh import processes, world

if TYPE_CHECKING:
    from nxd_jax.checkpoint.storage import BaseCheckpointStorage

logger = logging.getLogger("nxd_jax")

BEGUN = "checkpoint"
"""The mark of a tag that was begun: '1', and until it is complete who did."""

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_AGAIN = "another process began it again, or removed it, while this one was writing"
_numbers = itertools.count(1)
_mine: dict[Path, str] = {}
"""The marks that this process has written and not finished with, by folder."""


def claim(folder: Path) -> str:
    """What to write into the mark of a folder that this process begins."""
    _mine[folder] = f"1 {_identity()} {next(_numbers)}"
    return _mine[folder]


def release(folder: Path) -> None:
    """The tag is complete, or given up."""
    _mine.pop(folder, None)


def lost(folder: Path) -> bool:
    """Whether somebody else has begun, since this process did, what it writes."""
    return folder in _mine and _mark_of(folder) != _mine[folder]


def check_mine(folder: Path) -> None:
    """Raise FileExistsError if somebody else has."""
    if lost(folder):
        raise FileExistsError(_shared(folder, _AGAIN))


def owner(folder: Path) -> str | None:
    """'process 123' if another process of this machine is at work on what was begun in a folder, else None."""
    words = _mark_of(folder).split()
    if len(words) != 6 or words[1:3] != _machine().split() or int(words[3]) == os.getpid():
        return None
    return f"process {words[3]}" if _started(int(words[3])) == words[4] else None


def check_free(folder: Path) -> None:
    """Raise FileExistsError if another process of this machine is at work in a folder."""
    if (other := owner(folder)) is not None:
        raise FileExistsError(_shared(folder, f"{other} is saving it now"))


def begin(storage: BaseCheckpointStorage, tag: str, size: int | None = None) -> Path:
    """The folder to write a tag in, which the first process begins and all get. If it cannot, all raise: it OSError, the others RuntimeError.

    size: bytes of the tag.
    """
    failure: OSError | None = None
    told = b""
    if world.process_index() == 0:
        try:
            told = b"+" + storage.begin(tag).relative_to(storage.root).as_posix().encode()
        except OSError as error:
            failure = _full(error, storage.root / tag, storage.dirname(), size) or error
            told = b"-" + str(failure).encode()
    told = processes.exchange("save_checkpoint", told)[0]
    if failure is not None:
        raise failure
    if told.startswith(b"-"):
        raise RuntimeError(f"the first process could not begin the checkpoint {tag}: {told[1:].decode()}")
    return storage.root / told[1:].decode()


@contextlib.contextmanager
def writing(folder: Path, where: str, first: bool, size: int | None = None) -> Iterator[None]:
    """While a tag is written into a folder: what fails is removed, by the `first` process, and explained in one sentence.

    where: the directory of tags, as the user calls it. size: bytes of the tag.
    """
    with leftovers.quiet(), _saying_it_once(folder, where, first, size):
        yield


@contextlib.contextmanager
def _saying_it_once(folder: Path, where: str, first: bool, size: int | None) -> Iterator[None]:
    threads = logging.getLogger("absl")
    threads.addFilter(_raised_anyway)
    try:
        yield
    except BaseException as error:
        shared = lost(folder)
        leftovers.settle(_chain(error))
        if first and not shared:
            shutil.rmtree(folder, ignore_errors=True)
        release(folder)
        found = FileExistsError(_shared(folder, _AGAIN)) if shared else _full(error, folder, where, size)
        if found is None:
            raise
        logger.debug("a checkpoint could not be saved", exc_info=True)
        raise found from None
    finally:
        threads.removeFilter(_raised_anyway)
    release(folder)


def _raised_anyway(record: logging.LogRecord) -> bool:
    """A filter without what Orbax's threads log of errors that are raised as well: two tracebacks for each."""
    return "_SignalingThread" not in record.getMessage()


def _full(error: BaseException, folder: Path, where: str, size: int | None) -> OSError | None:
    """The error for the user, of a save that failed because the disk is full or files may not be so large; None for any other."""
    number = next((n for e in _chain(error) if (n := _number(e)) in _FULL), None)
    if number is None:
        return None
    what = f"the checkpoint {folder.name}" + (f" of {size / 1e6:.1f} MB" if size is not None else "")
    if number == errno.EFBIG:
        return OSError(
            number,
            f"{os.strerror(number)}: {what} was not saved to {where}, where a file may not be as large as one of its own; earlier checkpoints are as they "
            "were. Raise the limit of the shell (ulimit -f unlimited) or of the file system, or save elsewhere",
        )
    return OSError(
        number,
        f"{os.strerror(number)}: {what} was not saved to {where}, where {_free(folder)}; earlier checkpoints are as they were. Make room, keep fewer "
        "(num_kept_ckpts) or save elsewhere",
    )


def _shared(folder: Path, what: str) -> str:
    return f"the checkpoint {folder.name} in {folder.parent} is not only this job's: {what}. Give each job a folder, or a tag, of its own"


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        if isinstance(error, BaseExceptionGroup):
            for inner in error.exceptions:
                yield from _chain(inner)
        error = error.__cause__ or error.__context__


def _number(error: BaseException) -> int | None:
    """The system's number of an error; Orbax has it in the text alone."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    return next((n for n in _FULL if os.strerror(n) in str(error)), None)


def _free(folder: Path) -> str:
    """'3.1 MB are free'."""
    there = next((p for p in (folder, *folder.parents) if p.exists()), Path("/"))
    return f"{shutil.disk_usage(there).free / 1e6:.1f} MB are free"


# -- processes ---------------------------------------------------------------------------------------


def _mark_of(folder: Path) -> str:
    try:
        return (folder / BEGUN).read_text()
    except (OSError, ValueError):
        return ""


@functools.cache
def _machine() -> str:
    """Host and boot: numbers of processes mean nothing elsewhere."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = "-"
    return f"{socket.gethostname().replace(' ', '_') or '-'} {boot}"


def _identity() -> str:
    return f"{_machine()} {os.getpid()} {_started(os.getpid()) or '-'}"


def _started(pid: int) -> str | None:
    """When a process was started, as the system counts; None if it is gone, or the system does not say."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]
