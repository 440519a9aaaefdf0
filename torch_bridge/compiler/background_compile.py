"""Programs compiled beside the script, several at a time, in the runs of `neuron_parallel_compile`: all results there are zeros, so nothing waits for one.

The script's own thread records, traces and lowers; XLA then compiles on other threads, without Python's lock. A process ends when all its programs have been
compiled. What could not be compiled is told to the command (`compile_log`), which exits with 1, and the script goes on to the next graph.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax

from torch_bridge import _compat
from torch_bridge.config import environment
from torch_bridge.config.settings import SETTINGS
from torch_bridge.config.variables import VARIABLES
from torch_bridge.telemetry import compile_log

WORKERS = "NXD_JAX_COMPILE_WORKERS"
MOST = 8
"""Threads where the environment says nothing and the machine has more cores: each compilation needs memory."""

_pool: ThreadPoolExecutor | None = None


def wanted() -> bool:
    """Whether programs are only compiled, and somebody listens to what becomes of each.

    Not where several processes compile together, which must do so in one order, nor while HLO is dumped.
    """
    found = compile_log.told() if SETTINGS.extract_only else None
    return found is not None and found[0] == "compile" and jax.process_count() == 1 and not environment.dumping() and workers() > 1


def workers() -> int:
    """How many programs are compiled at a time."""
    said = VARIABLES[WORKERS].now()
    return said or min(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1, MOST)


def start(program: Any, args: Any) -> Future[Any]:
    """Trace and lower a `program.Program` for these arguments now, and compile it later; the future is of its executable."""
    global _pool
    found, started = compile_log.found(program), time.perf_counter()
    with compile_log.finishing(found, only_failures=True), _compat.enable_x64():
        compile_it = program.prepare(args)
    if _pool is None:
        _pool = ThreadPoolExecutor(workers(), thread_name_prefix="xla-compile")
    return _pool.submit(_finish, program, found, time.perf_counter() - started, compile_it)


def _finish(program: Any, found: compile_log.Found | None, spent: float, compile_it: Callable[[], Any]) -> Any:
    """spent: seconds on the script's thread; those in the queue do not count."""
    started = time.perf_counter() - spent
    with compile_log.finishing(found and found._replace(started=started)), _compat.enable_x64():
        made = compile_it()
    program.took(time.perf_counter() - started)
    return made
