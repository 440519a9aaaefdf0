"""What a compiled program depends on besides itself: versions, our own source, the environment, JAX's settings, the machine.

All of it is text under a few headings, made the same way in every process, so that two processes in equal surroundings can share executables.
"""

from __future__ import annotations

import functools
import hashlib
import os
import pathlib
import platform
import sys
import time
from collections.abc import Iterable
from typing import Any

import jax
import torch

from torch_bridge import _compat
from torch_bridge.config import compiler_flags

_LOADED = time.time()
"""When this package was loaded, about: source files that are newer are not what runs."""
_STARTING = 2.0
"""Seconds before `_LOADED` in which other modules of the package may have been loaded."""

PREFIXES = ("CUDA_", "JAX_", "LIBTPU_", "NEURON_", "NXD_JAX_", "TF_", "TPU_", "XLA_")
"""Environment variables that count."""
IGNORED = (
    "JAX_COMPILATION_CACHE_",
    "JAX_PERSISTENT_CACHE_",
    "NEURON_CC_FLAGS",  # parsed: see `_flags`
    "NEURON_COMPILE_CACHE_URL",
    "NEURON_DUMP_DIR",
    "NEURON_EXTRACT_GRAPHS_ONLY",  # the same programs, only not run
    "NEURON_FRAMEWORK_DEBUG",
    "NEURON_PARALLEL_COMPILE_",
    "NEURON_RT_LOG_",
    "NXD_JAX_EXECUTABLES",
    "NXD_JAX_TOP",
    "NXD_JAX_VERIFY",
)
"""Those of them that do not (all that start so): where things are kept and what is told about them."""


class UnknownError(Exception):
    """What a program depends on cannot be told for sure, so its executable is neither looked up nor kept. The text says what it was."""


def describe() -> dict[str, str]:
    """The surroundings of this process and thread now, by heading. Raises `UnknownError` if our source has changed since it was loaded."""
    return {"source": source_digest(), **outside()}


def outside() -> dict[str, str]:
    """`describe` without our own source."""
    return {
        "versions": _versions(),
        "environment": _environment(),
        "jax": _jax_settings(),
        "torch": _torch_settings(),
        "machine": _machine(),
    }


@functools.cache
def _versions() -> str:
    import jaxlib
    import numpy

    modules = (jax, jaxlib, numpy, torch)
    return repr([sys.version, torch.version.git_version, *((m.__name__, m.__version__) for m in modules)])


@functools.cache
def source_digest() -> str:
    """A hash of every Python file of this package. Raises `UnknownError` for one that is newer than the process."""
    root = pathlib.Path(__file__).parents[1]
    digest = hashlib.sha256()
    for file in sorted(root.rglob("*.py")):
        if file.stat().st_mtime > _LOADED - _STARTING:
            raise UnknownError(f"{file} has changed since this process loaded it")
        digest.update(f"{file.relative_to(root)}\0".encode())
        digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


def _environment() -> str:
    found = {k: v for k, v in os.environ.items() if k.startswith(PREFIXES) and not k.startswith(IGNORED)}
    return repr((sorted(found.items()), _flags()))


def _flags() -> list[tuple[str, Any]]:
    """NEURON_CC_FLAGS but for the cache's own."""
    return sorted((k, v) for k, v in compiler_flags.current().items() if k not in ("--cache_dir", "--no_cache"))


def _jax_settings() -> str:
    """Every setting as it is in this thread now, but for those of JAX's cache, and XLA's flags as it took them."""
    values = jax.config.values
    names = sorted(n for n in values if "compilation_cache" not in n and "persistent_cache" not in n)
    return stable([f"{n}={getattr(jax.config, n, values[n])!r}" for n in names] + _compat.trace_context() + [_compat.compile_options()])


def _torch_settings() -> str:
    """What torch's decompositions may ask for while a program is traced."""
    return repr(
        (
            torch.get_default_dtype(),
            torch.are_deterministic_algorithms_enabled(),
            [(d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "xla")],
            torch.get_float32_matmul_precision(),
        )
    )


@functools.cache
def _machine() -> str:
    """Of the host: its kind of processor, what that can do, and how many there are."""
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    told = cpuinfo.read_text().split("\n\n", 1)[0].splitlines() if cpuinfo.exists() else []
    wanted = ("vendor_id", "cpu family", "model", "model name", "stepping", "flags", "Features", "CPU part")
    features = [line for line in told if line.split(":")[0].strip() in wanted]
    return repr((platform.system(), platform.machine(), platform.processor(), os.cpu_count(), features))


def stable(texts: Iterable[str]) -> str:
    """The texts as one. Raises `UnknownError` if there is an address among them, which another process would not have."""
    found = "\n".join(texts)
    at = found.find(" at 0x")
    if at >= 0:
        raise UnknownError(f"{found[max(found.rfind(chr(10), 0, at), 0) : at].strip()[-120:]} has no text that other processes share")
    return found
