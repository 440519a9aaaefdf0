"""Index maps in files, as the original keeps them: made once, by one process, and mapped to memory by all."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import filelock
import numpy as np

from nxd_jax.training.data import partials
from nxd_jax.training.data.megatron import index_maps
from nxd_jax.training.data.megatron.index_maps import Maps, Wanted

logger = logging.getLogger("nxd_jax")

NAMES = {"documents": "doc_idx", "samples": "sample_idx", "shuffle": "shuffle_idx"}


def stem(prefix: str | os.PathLike[str], name: str, wanted: Wanted, folder: str | os.PathLike[str] | None = None) -> Path:
    """What the names of the three files begin with. name: "train", "valid" or "test". folder: `data.index_mapping_dir`; None: beside the data."""
    base = Path(prefix) if folder is None else Path(folder) / Path(prefix).name
    return base.with_name(f"{base.name}_{name}_indexmap_{wanted.samples}ns_{wanted.seq_length}sl_{wanted.seed}s")


def load_or_build(prefix: str | os.PathLike[str], name: str, wanted: Wanted, folder: str | os.PathLike[str] | None = None) -> Maps:
    """The maps: from their files if these are there and fit, else they are built and written. Beside data that lies where nothing can be written, they are
    kept in memory.

    (The original takes files by their names alone, which say nothing of `data.splits_string`, of how samples are cut, and of data that was made again.)

    Raises OSError for a `data.index_mapping_dir` that cannot be written to.
    """
    base = stem(prefix, name, wanted, folder)
    found = _fitting(base, wanted)
    if found is not None:
        return found
    try:
        base.parent.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(base.with_name(f".{base.name}.lock")):
            found = _fitting(base, wanted, warn=True)  # another process may have built them meanwhile
            if found is None:
                logger.info("%s: building index maps of %d samples for %s, from %d epochs", prefix, wanted.length, name, wanted.epochs)
                _write(index_maps.build(wanted), base)
                found = _open(base)
        return found
    except OSError as error:
        if folder is not None:
            raise OSError(f"data.index_mapping_dir={folder}: index maps cannot be written there: {error}") from error
        logger.warning(
            "%s: index maps are kept in memory, as they cannot be written beside the data (%s); data.index_mapping_dir names another folder",
            prefix,
            error,
        )
        return index_maps.build(wanted)


def _file(base: Path, part: str) -> Path:
    return base.with_name(f"{base.name}_{NAMES[part]}.npy")


def _open(base: Path) -> Maps:
    return Maps(**{part: np.load(_file(base, part), mmap_mode="r", allow_pickle=False) for part in NAMES})


def _fitting(base: Path, wanted: Wanted, warn: bool = False) -> Maps | None:
    """The maps of files that are there, if they are those that are wanted."""
    if not all(_file(base, part).is_file() for part in NAMES):
        return None
    try:
        found = _open(base)
        reason = index_maps.misfit(wanted, found)
    except (ValueError, EOFError) as error:
        reason = str(error)
    if reason is None:
        return found
    if warn:
        logger.warning("%s_*_idx.npy are built anew: %s", base, reason)
    return None


def _write(maps: Maps, base: Path) -> None:
    """Each file appears as a whole."""
    for part in NAMES:
        file = _file(base, part)
        partials.remove_old(file)
        partial = partials.partial(file)
        try:
            with partial.open("wb") as out:
                np.save(out, getattr(maps, part), allow_pickle=False)
            os.replace(partial, file)
        finally:
            partials.remove(partial)
