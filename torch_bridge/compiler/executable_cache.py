"""Executables found on disk by what they are made of, so that a warm start neither traces nor lowers what a process before it compiled.

JAX's persistent cache (`xla_cache`) has to trace and lower a program to know its name there, which takes as long as all else in the first step of a
warm start. Here the name comes from the recorded graph, or from what `jax.export` wrote (`cache_keys`). An entry, a small file in `executables/` in the
folder that `xla_cache.use` was given, says under which key JAX's cache has the machine code and how it is called; the code stays where it is, and is
evicted there.

An entry is a line of text, a SHA-256 of what follows, and that: a pickle, compressed. As with JAX's own cache, whoever can write the folder can run code
in processes that read it.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import pathlib
import pickle
import uuid
import zlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax

from torch_bridge import _compat, metrics
from torch_bridge.compiler import cache_keys, equal_programs
from torch_bridge.compiler.cache_environment import UnknownError
from torch_bridge.config import environment
from torch_bridge.config.variables import VARIABLES

if TYPE_CHECKING:
    from torch_bridge.compiler.program import Program

logger = logging.getLogger("nxd_jax")

HEAD = b"nxd_jax executable 2\n"
"""How an entry starts; another number for another format."""
SUFFIX = ".executable"
_SWITCH = "NXD_JAX_EXECUTABLES"


class Code(NamedTuple):
    """Where machine code lies: JAX's key, and the SHA-256 of JAX's entry."""

    key: str
    digest: bytes


class DamagedError(Exception):
    """An entry is not what was written."""


def prepared(program: Program, args: Sequence[Any]) -> Callable[[], Any]:
    """What gives the `jax.stages.Compiled` of a program for these arguments, on any thread: it is found on disk, or lowered now, to be compiled there and noted
    for the next process."""
    file = _file(lambda: cache_keys.parts(program.spec, args))
    if file is None:
        return equal_programs.compiling(program, program.jitted.lower(*args))
    found = _found(file)
    if found is not None:
        return lambda: found
    return functools.partial(_compile_program, program, equal_programs.compiling(program, program.jitted.lower(*args)), file)


def exported(program: bytes, shapes: Any, call: str, lower: Callable[[], Any]) -> Any:
    """The `jax.stages.Compiled` of a program that `jax.export` serialized: it is found on disk, or lowered and compiled, and noted for the next process.

    shapes: its arguments, as `jax.ShapeDtypeStruct`s. call: what else `lower` depends on, as text. lower: makes the `jax.stages.Lowered`.
    """
    file = _file(lambda: cache_keys.of_exported(program, shapes, call))
    if file is None:
        return lower().compile()
    found = _found(file)
    if found is not None:
        return found
    made, code = _compile(lower().compile)
    if code is not None:
        _write(file, made, code)
    return made


def _compile_program(program: Program, compile: Callable[[], Any], file: pathlib.Path) -> Any:
    made, code = _compile(compile)
    copied = code is None  # if it has any: of a program that was compiled for other devices
    program.code = program.code if code is None else code
    if program.code is not None:
        _write(file, made, program.code, copied)
    return made


def _compile(compile: Callable[[], Any]) -> tuple[Any, Code | None]:
    """What `compile` gives, and where its machine code lies, if JAX's cache had it or has it now."""
    with _compat.watch_cache_entries() as seen:
        made = compile()
    if len(seen) != 1:
        return made, None
    key, packed = seen[0]
    return made, Code(key, hashlib.sha256(packed).digest())


def _folder() -> pathlib.Path | None:
    """Where entries lie, if there are any. Several processes would all have to hit or all to miss, which nothing makes sure of; while HLO is dumped, all is
    compiled."""
    from torch_bridge.compiler import xla_cache

    place = xla_cache.folder()
    if place is None or environment.dumping() or jax.process_count() > 1 or VARIABLES[_SWITCH].now() is False:
        return None
    return place / "executables"


def _file(depends: Callable[[], dict[str, str]]) -> pathlib.Path | None:
    """The entry of a program that depends on these parts; None if it cannot be said what it depends on, or entries are not used."""
    folder = _folder()
    if folder is None:
        return None
    try:
        parts = depends()
    except UnknownError as error:
        logger.debug("this program is traced in every process: %s", error)
        return None
    except Exception as error:  # a JAX whose inner parts are elsewhere: slower starts, nothing worse
        logger.info("programs are traced in every process: %s: %s", type(error).__name__, _first_line(error))
        return None
    if logger.isEnabledFor(logging.DEBUG):
        logger.debug("a program depends on %s", {k: hashlib.sha256(v.encode()).hexdigest()[:8] for k, v in parts.items()})
    return folder / f"{cache_keys.digest(parts)}{SUFFIX}"


def _setting(name: str) -> Any:
    return getattr(jax.config, name)


# -- entries --------------------------------------------------------------------------------------


def _found(file: pathlib.Path) -> Any:
    """`_read`, counted."""
    found = _read(file)
    if found is not None:
        metrics.count("PersistentCacheHit")
    return found


def _read(file: pathlib.Path) -> Any:
    """What an entry stands for, loaded; None if there is none, or if it or JAX's entry is of no use."""
    try:
        data = file.read_bytes()
    except OSError:
        return None
    try:
        entry = _unpacked(data)
        packed = _compat.cache_entry(entry.code.key)
        if packed is None or hashlib.sha256(packed).digest() != entry.code.digest:
            logger.debug("%s: JAX's cache has its code no more", file)
            return None
        by_id = {d.id: d for d in jax.devices()}
        return _compat.with_code(entry.pickled, packed, [by_id[k] for k in entry.devices], entry.copied)
    except Exception as error:
        logger.warning("%s cannot be used, so its program is compiled again: %s: %s", file, type(error).__name__, _first_line(error))
        if _writable():
            with contextlib.suppress(OSError):
                file.unlink()
        return None


class Entry(NamedTuple):
    """What an entry says.

    code: where the machine code lies. copied: that was compiled for other devices. devices: by number, in the program's order. pickled: how it is called.
    """

    code: Code
    copied: bool
    devices: list[int]
    pickled: bytes


def _unpacked(data: bytes) -> Entry:
    head, mark, body = data[: len(HEAD)], data[len(HEAD) : len(HEAD) + 32], data[len(HEAD) + 32 :]
    if head != HEAD:
        raise DamagedError("it does not start as entries do")
    if hashlib.sha256(body).digest() != mark:
        raise DamagedError("it is not what was written")
    code, copied, devices, pickled = pickle.loads(zlib.decompress(body))
    return Entry(Code(*code), copied, devices, pickled)


def _packed(made: Any, code: Code, copied: bool) -> bytes:
    pickled, devices = _compat.without_code(made)
    body = zlib.compress(pickle.dumps((tuple(code), copied, devices, pickled)))
    return HEAD + hashlib.sha256(body).digest() + body


def _write(file: pathlib.Path, made: Any, code: Code, copied: bool = False) -> None:
    """Note an executable: whole or not at all, whoever else writes. One that cannot be pickled, or a full disk, is no error."""
    if not _writable():
        return
    try:
        data = _packed(made, code, copied)
        file.parent.mkdir(parents=True, exist_ok=True)
        if _setting("jax_compilation_cache_max_size") >= 0:
            _sweep(file.parent)
        part = file.with_name(f".{uuid.uuid4().hex}.part")
        try:
            part.write_bytes(data)
            part.replace(file)
        finally:
            part.unlink(missing_ok=True)
    except Exception as error:
        logger.info("%s is not written: %s: %s", file, type(error).__name__, _first_line(error))


def _writable() -> bool:
    """Whether entries may be added and removed (`xla_cache.use(readonly=True)`: no)."""
    return bool(_setting("jax_persistent_cache_min_compile_time_secs") != float("inf"))


def _sweep(folder: pathlib.Path) -> None:
    """Remove the entries whose code JAX has evicted."""
    for file in folder.glob(f"*{SUFFIX}"):
        with contextlib.suppress(Exception):
            key = _unpacked(file.read_bytes()).code.key
            if not (folder.parent / f"{key}-cache").exists():
                file.unlink()


def _first_line(error: Exception) -> str:
    return str(error).split("\n")[0][:200]
