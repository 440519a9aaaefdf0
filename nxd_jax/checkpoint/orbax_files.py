"""Arrays to and from disk, with Orbax: a folder of full arrays, which any program can read with `orbax.checkpoint`."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np

from nxd_jax.checkpoint import chunk_sums, shares
from torch_bridge import _compat

INDEX = "tensors.json"
"""What the folder holds, by name: full shape, stored shape and dtype of each array; and the layout of the ranks that wrote it."""

FORMAT = 1

_PATTERN = frozenset("*?[\\")


class DamagedCheckpointError(RuntimeError):
    """A checkpoint's files cannot be read."""


_saves = itertools.count()


def save(folder: Path, arrays: Mapping[str, Any], index: Mapping[str, Any]) -> None:
    """Write arrays (`jax.Array`s, numpy's, or a `Share` of each) and the index. All processes call it. Not atomic: the tag is.

    Arrays without entries are in the index alone: Orbax takes none.
    """
    import orbax.checkpoint as ocp

    arrays = {name: a for name, a in arrays.items() if a.nbytes}
    if arrays:
        handler = shares.handler() if any(isinstance(a, shares.Share) for a in arrays.values()) else None

        def write() -> None:
            folder.mkdir(parents=True, exist_ok=True)
            with _plainly_named(folder) as place, _checkpointer(range(jax.process_count()), handler) as checkpointer, chunk_sums.written():
                checkpointer.save(place / "arrays", args=ocp.args.PyTreeSave(dict(arrays)), force=True)

        _in_64_bits(write)
    if jax.process_index() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / INDEX, "w") as f:
            json.dump({"format": FORMAT, **index}, f, indent=1)
            f.flush()
            os.fsync(f.fileno())


@contextlib.contextmanager
def _plainly_named(folder: Path) -> Iterator[Path]:
    """The absolute path of a folder, or of a link to it, without characters that mean something to Orbax: it takes the whole path for a pattern of files, finds
    none in `lr=[1, 2]`, and then says that a checkpoint is complete which nothing reads."""
    path = folder.absolute()
    if _PATTERN.isdisjoint(str(path)):
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="nxd_jax_checkpoint_") as place:
        if not _PATTERN.isdisjoint(place):
            raise OSError(
                f"{folder} has one of {' '.join(sorted(_PATTERN))} in its name, and so has {place}: set TMPDIR to a folder without"
            )
        link = Path(place) / "linked"
        link.symlink_to(path, target_is_directory=True)
        yield link


def _in_64_bits(work: Callable[[], Any]) -> Any:
    """The result of a call of Orbax that keeps 64-bit dtypes.

    JAX keeps them per thread. Under a running event loop, as in a notebook's kernel, Orbax would go on in a thread of its own, and float64 arrays would
    become float32: there the whole call runs in a thread without a loop.
    """

    def wide() -> Any:
        with _compat.enable_x64():
            return work()

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return wide()
    with ThreadPoolExecutor(1, thread_name_prefix="checkpoint") as pool:
        return pool.submit(wide).result()


def _checkpointer(processes: Sequence[int], types: Any = None) -> Any:
    """Orbax's, which has these processes wait for each other by messages. (Without them named, they do by a collective, which could get between those of
    training.) types: what writes arrays of which type; None: Orbax's own."""
    import orbax.checkpoint as ocp

    handler = ocp.PyTreeCheckpointHandler(use_compression=False, **({} if types is None else {"type_handler_registry": types}))
    if jax.process_count() == 1:
        return ocp.Checkpointer(handler)
    first, prefix = processes[0], f"nxd_jax_{next(_saves)}" if len(processes) > 1 else None
    how = ocp.options.MultiprocessingOptions(primary_host=first, active_processes=set(processes), barrier_sync_key_prefix=prefix)
    return ocp.Checkpointer(handler, multiprocessing_options=how)


def read_index(folder: Path) -> dict[str, Any]:
    """The index of a folder. Raises FileNotFoundError if there is none, DamagedCheckpointError if it cannot be read or is of a later format."""
    path = folder / INDEX
    if not path.is_file():
        raise FileNotFoundError(f"{folder} holds no tensors of nxd_jax: there is no {path}")
    try:
        found: dict[str, Any] = json.loads(path.read_text())
    except ValueError as error:
        raise DamagedCheckpointError(f"{path} is damaged: {error}. Load another tag") from error
    if found.get("format") != FORMAT:
        raise DamagedCheckpointError(
            f"{path} has format {found.get('format')!r}, this release reads {FORMAT}: it was written by a later release"
        )
    return found


def restore(folder: Path, targets: Mapping[str, jax.ShapeDtypeStruct | None]) -> dict[str, Any]:
    """Read some arrays: for each a shape, dtype and sharding (cut or padded with zeros at the ends to that shape), or None for a numpy array as stored.

    Every process reads what its devices hold, and waits for nobody. Raises DamagedCheckpointError naming the folder.
    """
    import orbax.checkpoint as ocp

    if not targets:
        return {}
    item: dict[str, Any] = {}
    args: dict[str, Any] = {}
    for name, target in targets.items():
        if target is None:
            item[name], args[name] = 0, ocp.RestoreArgs(restore_type=np.ndarray)
        else:
            item[name] = target
            args[name] = ocp.ArrayRestoreArgs(sharding=target.sharding, global_shape=target.shape, dtype=target.dtype, strict=False)

    def read() -> dict[str, Any]:
        with _plainly_named(folder) as place, _checkpointer([jax.process_index()]) as checkpointer:
            asked = ocp.args.PyTreeRestore(item=item, restore_args=args, partial_restore=True)
            return dict(checkpointer.restore(place / "arrays", args=asked))

    try:
        found: dict[str, Any] = _in_64_bits(read)
    except Exception as error:
        if not _is_of_files(error):
            raise
        said = str(error.__cause__ if type(error) is Exception and error.__cause__ else error).partition("\n")[0]
        if chunk_sums.FAILED in said:
            said = f"bytes on disk are not those that were written, a checksum differs ({said})"
        raise DamagedCheckpointError(f"the arrays in {folder} cannot be read: {said}. Load another tag") from error
    return found


def _is_of_files(error: Exception) -> bool:
    """Whether reading fails for what is in the files. Orbax raises an Exception of no class of its own for data that are missing or cut off."""
    return isinstance(error, (OSError, ValueError, KeyError)) or type(error) is Exception


def empty(shape: Sequence[int], dtype: Any, sharding: Any = None) -> Any:
    """An array without entries, as `restore` would give it; numpy's without a sharding."""
    if sharding is None:
        return np.empty(shape, dtype)
    with _compat.enable_x64():
        return jax.make_array_from_callback(tuple(shape), sharding, lambda place: np.empty(shape, dtype)[place])


def batches(sizes: Mapping[str, int], limit: int) -> Iterator[Sequence[str]]:
    """Names in groups of at most `limit` bytes together (or one)."""
    group: list[str] = []
    total = 0
    for name, size in sizes.items():
        if group and total + size > limit:
            yield group
            group, total = [], 0
        group.append(name)
        total += size
    if group:
        yield group
