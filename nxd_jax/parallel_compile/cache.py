"""The folder of compiled programs, from outside: which one it is, and what in it may go."""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

DEFAULT = "/var/tmp/neuron-compile-cache"
"""Neuron's own default; it is used where nothing names a folder."""
OLD = 24 * 3600.0
"""Seconds after which a file in the making is nobody's any more."""


def is_chosen(environ: Mapping[str, str]) -> bool:
    """Whether a variable names a folder, so that a plain run of the script uses it too."""
    return _named(environ) is not None


def folder(environ: Mapping[str, str]) -> Path:
    """NEURON_CC_FLAGS --cache_dir, else NEURON_COMPILE_CACHE_URL, else JAX_COMPILATION_CACHE_DIR, else `DEFAULT`.

    Raises SystemExit for storage that is no folder, and for `--no_cache`.
    """
    if "--no_cache" in shlex.split(environ.get("NEURON_CC_FLAGS", "")):
        raise SystemExit("neuron_parallel_compile: NEURON_CC_FLAGS has --no_cache, so nothing would be kept; leave it out")
    place = (_named(environ) or DEFAULT).removeprefix("file://")
    if re.match(r"\w+://", place):
        raise SystemExit(
            f"neuron_parallel_compile: {place}: only folders can keep compiled programs; set NEURON_COMPILE_CACHE_URL to one that all "
            "processes see"
        )
    return Path(place).expanduser()


def _named(environ: Mapping[str, str]) -> str | None:
    flags = re.search(r"--cache_dir[= ]\s*(\S+)", environ.get("NEURON_CC_FLAGS", ""))
    return (flags and flags[1]) or environ.get("NEURON_COMPILE_CACHE_URL") or environ.get("JAX_COMPILATION_CACHE_DIR") or None


def clear_locks(place: Path) -> int:
    """Remove locks, and files that a process has been making for more than a day (it was killed); returns how many."""
    before = time.time() - OLD
    return _remove(
        f for f in _files(place) if _is_lock(f) or (f.name.startswith(".") and f.suffix == ".part" and f.stat().st_mtime < before)
    )


def clean(place: Path) -> int:
    """Remove compiled programs, and nothing else that may lie in the folder; returns how many files went."""
    return _remove(f for f in _files(place) if _is_lock(f) or f.name.endswith(("-cache", "-atime", ".executable", ".part")))


def _files(place: Path) -> Iterator[Path]:
    for part in (place, place / "executables"):
        if part.is_dir():
            yield from sorted(f for f in part.iterdir() if f.is_file())


def _is_lock(file: Path) -> bool:
    return file.name == ".lockfile" or file.suffix == ".lock"


def _remove(files: Iterator[Path]) -> int:
    count = 0
    for file in files:
        file.unlink(missing_ok=True)
        count += 1
    return count
