"""Compiled programs on disk, so that the next process compiles nothing that this one did: JAX's persistent compilation cache under Neuron's names.

An executable is stored under a hash of its whole HLO, the compile options, XLA_FLAGS, the device and the versions of JAX and XLA: whatever changes the
numbers changes the name. The counters `PersistentCacheHit` and `PersistentCacheMiss` tell programs loaded from programs compiled. An entry that cannot
be read (a process was killed while it wrote) is replaced. Before JAX is asked, `executable_cache` looks in the same folder by recorded graph. While HLO
dumps are asked for (`environment.dumping`), nothing is read, so that all that runs is compiled and dumped.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import warnings
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

from torch_bridge import _compat, metrics
from torch_bridge.config import environment

_ASKED, _HIT = "/jax/compilation_cache/compile_requests_use_cache", "/jax/compilation_cache/cache_hits"


def configure(values: dict[str, Any]) -> None:
    """Use the folder of `--cache_dir` or `NEURON_COMPILE_CACHE_URL`, if any; JAX_COMPILATION_CACHE_DIR stays in force if not."""
    _listen()
    name, place = environment.cache_folder(values)
    if place:
        folder = _folder(name, place)
        if folder is not None:
            use(folder)


def _folder(name: str, place: str) -> pathlib.Path | None:
    """The folder that a variable names, made if it is not there. None, with a warning, for storage that is no folder."""
    place = place.removeprefix("file://")
    if re.match(r"\w+://", place):
        warnings.warn(
            f"{name}={place}: only folders can keep compiled programs, so nothing is kept; name a folder that all processes see",
            stacklevel=4,
        )
        return None
    folder = pathlib.Path(place).expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{name}={place}: must be a folder that can be written ({error.strerror})") from error
    return folder


_used: str | None = None


def use(folder: str | os.PathLike[str], readonly: bool = False) -> None:
    """Keep compiled programs in this folder. readonly: use what is there and add nothing."""
    global _used
    _used = os.fspath(folder)
    jax.config.update("jax_compilation_cache_dir", _used)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", float("inf") if readonly else 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    compilation_cache.reset_cache()


def folder() -> pathlib.Path | None:
    """The folder that `use` was given last, if it is still in force. (`executable_cache` leaves a folder that JAX was told of alone.)"""
    is_in_force = environment.jax_keeps_programs() and jax.config.jax_compilation_cache_dir == _used  # type: ignore[attr-defined]
    return pathlib.Path(_used) if _used is not None and is_in_force else None


_listening = False


def _listen() -> None:
    global _listening
    if not _listening:
        jax.monitoring.register_event_listener(_count)
        _compat.check_cache_entries(_replace, environment.dumping)
        _listening = True


def _count(event: str, **_: Any) -> None:
    """JAX says when it asks the cache and when it finds something; a program is a miss until it is found."""
    if event == _ASKED and jax.config.jax_compilation_cache_dir:  # type: ignore[attr-defined]
        metrics.count("PersistentCacheMiss")
        metrics.MISSES.of_thread += 1
    elif event == _HIT:
        metrics.count("PersistentCacheMiss", -1)
        metrics.MISSES.of_thread -= 1
        metrics.count("PersistentCacheHit")


_reported: set[pathlib.Path] = set()


def _replace(entry: pathlib.Path) -> None:
    """Remove an entry that cannot be read, so that the program compiled instead is kept; the first one in a folder is reported."""
    readonly = jax.config.jax_persistent_cache_min_compile_time_secs == float("inf")  # type: ignore[attr-defined]
    if not readonly:
        with contextlib.suppress(OSError):
            entry.unlink()
    if entry.parent not in _reported:
        _reported.add(entry.parent)
        done = "The folder is read-only, so they stay" if readonly else "They are replaced"
        warnings.warn(
            f"damaged entries in the cache of compiled programs {entry.parent}, such as {entry.name}: their programs are compiled again. {done}.",
            stacklevel=2,
        )
