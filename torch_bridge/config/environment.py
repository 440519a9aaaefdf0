"""Environment variables that must be acted on before JAX starts or when a graph is compiled.

`XLA_FLAGS`: XLA aborts the process at a flag that its build does not know. Flags that only the Neuron compiler knows are dropped, with one
warning. `XLA_FLAGS=--xla_dump_to=DIR` and the other dump flags are XLA's own and work as they are. While dumps are asked for (`dumping`), every program is
compiled, also if a cache on disk has it: XLA dumps only what it compiles.

All others are rows of the table in `variables`, which `check` applies once, when the first xla tensor is made.

`NEURON_FRAMEWORK_DEBUG=1`: each compiled graph is written to `MODULE_<hash>/` in the current directory, or in `NEURON_DUMP_DIR` (our own
variable) if set: `graph.txt` (aten ops with module paths and source lines), `stablehlo.mlir`, `optimized_hlo.txt`.
"""

from __future__ import annotations

import contextlib
import difflib
import logging
import mmap
import os
import pathlib
import re
import shlex
import sys
import warnings
from typing import Any

_checked: str | None = None


def prepare() -> None:
    """Make the environment safe for JAX to start in. Cheap when nothing has changed since the last call; does not import JAX."""
    global _checked
    flags = os.environ.get("XLA_FLAGS", "")
    if flags == _checked:
        return
    if flags.strip().startswith("-"):
        os.environ["XLA_FLAGS"] = flags = _known_only(flags)
    _checked = flags


def _known_only(flags: str) -> str:
    tokens = shlex.split(flags)
    names = {t: re.split("=", t.lstrip("-"), maxsplit=1)[0] for t in tokens if t.startswith("-")}
    unknown = _unknown(set(names.values()))
    dropped = [t for t in tokens if names.get(t) in unknown]
    if not dropped:
        return flags
    warnings.warn(
        f"dropped from XLA_FLAGS, because this jaxlib does not know them and would abort: {' '.join(dropped)}. Kept: "
        f"{[t for t in tokens if t not in dropped]}.",
        stacklevel=3,
    )
    return shlex.join(t for t in tokens if t not in dropped)


def _unknown(names: set[str]) -> set[str]:
    """Which flags the installed jaxlib has no name for: a flag's name is a string in its shared library."""
    import importlib.util

    spec = importlib.util.find_spec("jaxlib")
    if spec is None or not spec.submodule_search_locations:
        return set()
    libraries = pathlib.Path(spec.submodule_search_locations[0]).glob("*.so")
    largest = max(libraries, key=lambda p: p.stat().st_size, default=None)
    if largest is None:
        return set()
    with largest.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as binary:

        def named(name: str) -> bool:
            return binary.find(name.encode() + b"\0") >= 0

        if not named("xla_dump_to"):  # the library is not where we look: leave the judgement to XLA
            return set()
        return {n for n in names if not named(n)}


def check() -> dict[str, Any]:
    """The values of all variables that are set, by name. ValueError for one that is not allowed; warnings for what has no effect or is unknown."""
    from torch_bridge.config import compiler_flags
    from torch_bridge.config.variables import VARIABLES, WARN

    values: dict[str, Any] = {}
    for name, variable in VARIABLES.items():
        value = variable.parse(os.environ.get(name, ""))
        if value is not None:
            values[name] = value
        if value and variable.rule == WARN:
            warnings.warn(f"{name}={os.environ[name]} has no effect: {variable.meaning}", stacklevel=2)
    _warn_unknown(set(VARIABLES))
    _check_lnc(values, compiler_flags.current().get("--lnc"))
    if "NEURON_RT_LOG_LEVEL" in values:
        _set_log_level(values["NEURON_RT_LOG_LEVEL"])
    return values


def cache_folder(values: dict[str, Any]) -> tuple[str, str]:
    """The variable that names a folder for compiled programs, and the folder; empty if none does. values: what `check` gave."""
    from torch_bridge.config import compiler_flags

    flags = compiler_flags.current()
    if flags.get("--no_cache"):
        return "", ""
    named = {
        "NEURON_CC_FLAGS --cache_dir": flags.get("--cache_dir"),
        "NEURON_COMPILE_CACHE_URL": values.get("NEURON_COMPILE_CACHE_URL"),
    }
    return next(((name, place) for name, place in named.items() if place), ("", ""))


def keeps_programs(values: dict[str, Any]) -> bool:
    """Whether programs that run will be kept on disk from the first on: our variables say so, JAX's, or what the script has told JAX."""
    if values.get("NEURON_EXTRACT_GRAPHS_ONLY"):
        return False
    return bool(cache_folder(values)[1]) or jax_keeps_programs()


def jax_keeps_programs() -> bool:
    """Whether JAX keeps what it compiles on disk, in whoever's folder; before it is imported, whether the environment tells it to."""
    jax = sys.modules.get("jax")
    if jax is None:
        return bool(os.environ.get("JAX_COMPILATION_CACHE_DIR"))
    return bool(jax.config.jax_compilation_cache_dir and jax.config.jax_enable_compilation_cache)


def _check_lnc(values: dict[str, Any], flag: str | None) -> None:
    """The two variables and the flag for physical cores per logical core say the same, where they are set."""
    new, old = "NEURON_LOGICAL_NC_CONFIG", "NEURON_RT_VIRTUAL_CORE_SIZE"
    name = new if new in values else old
    lnc = values.get(name)
    if lnc != values.get(old, lnc):
        raise ValueError(f"{new}={lnc} and {old}={values[old]} disagree; they mean the same, so unset the older {old}")
    if lnc and flag and flag != lnc:
        raise ValueError(f"NEURON_CC_FLAGS: --lnc={flag} disagrees with {name}={lnc}; set both to the same")


def _warn_unknown(known: set[str]) -> None:
    """One warning for all `NEURON_*` variables that are not in the table."""
    found = []
    for name in sorted(n for n in os.environ if n.startswith("NEURON_") and n not in known):
        close = difflib.get_close_matches(name, known, n=1)
        found.append(f"{name} (did you mean {close[0]}?)" if close else name)
    if found:
        warnings.warn(
            f"unknown environment variables, which have no effect: {', '.join(found)}. docs/reference/environment.md lists those known.",
            stacklevel=3,
        )


def _set_log_level(level: str) -> None:
    logger = logging.getLogger("torch_bridge")
    logger.setLevel("DEBUG" if level == "TRACE" else level)
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        logger.addHandler(handler)


_DUMP_FLAG = re.compile(r"(?:^|\s)--?xla_dump_")


def dumping() -> bool:
    """Whether programs are to be written down as they are compiled, by XLA_FLAGS or NEURON_FRAMEWORK_DEBUG.

    Caches on disk are then not read (they are still written): XLA dumps nothing of a program that it does not compile, and one that was found has the module
    names and source lines of the run that compiled it.
    """
    flags = os.environ.get("XLA_FLAGS", "").strip()
    if flags and not flags.startswith("-"):  # a file of flags
        with contextlib.suppress(OSError):
            flags = pathlib.Path(flags).read_text()
    return bool(_DUMP_FLAG.search(flags)) or framework_debug()


def framework_debug() -> bool:
    from torch_bridge.config.variables import VARIABLES

    return bool(VARIABLES["NEURON_FRAMEWORK_DEBUG"].now())
