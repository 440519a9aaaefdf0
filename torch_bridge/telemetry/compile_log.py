"""What `neuron_parallel_compile` hears from the processes of the script that it runs: which graphs they meet and what became of each.

`NXD_JAX_COLLECT=<command>:<folder>` in the environment of a process has it append a line of JSON for each event to `<folder>/<process id>.jsonl`. The
command is "compile", or "collect": graphs are noted and not compiled. Without the variable nothing happens here.

    {"event": "found", "graph": "1f0c2a44", "number": 0, "ops": 61, "source": "train.py:88"}
    {"event": "compiled", ..., "seconds": 1.2, "cached": false}
    {"event": "failed", ..., "seconds": 0.3, "error": "..."}
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch_bridge import metrics

VARIABLE = "NXD_JAX_COLLECT"
COMMANDS = ("compile", "collect")

_names: Counter[str] = Counter()
_noted: set[int] = set()
_writing = threading.Lock()


def told() -> tuple[str, pathlib.Path] | None:
    """The command and the folder; None for a process that nobody listens to. ValueError for a command that is none."""
    text = os.environ.get(VARIABLE, "")
    if not text:
        return None
    command, _, folder = text.partition(":")
    if command not in COMMANDS or not folder:
        raise ValueError(f"{VARIABLE}={text!r}: must be compile:<folder> or collect:<folder>; `neuron_parallel_compile` sets it")
    return command, pathlib.Path(folder)


def only_noted(program: Any) -> bool:
    """Whether a program is to be noted and not compiled; notes it the first time."""
    listens = told()
    if listens is None or listens[0] != "collect":
        return False
    if id(program) not in _noted:
        _noted.add(id(program))
        _KEPT.append(program)
        found(program)
    return True


_KEPT: list[Any] = []
"""The programs noted: their ids must not come again."""


@contextlib.contextmanager
def watched(program: Any) -> Iterator[None]:
    """Around the compilation of a program: tells what it is, how long it took, and whether it was in the persistent cache."""
    with finishing(found(program)):
        yield


class Found(NamedTuple):
    """A program that was told of. folder: where; facts: what it is; started: on the clock of `time.perf_counter`."""

    folder: pathlib.Path
    facts: dict[str, Any]
    started: float


def found(program: Any) -> Found | None:
    """Tell of a program that is going to be compiled; None if nobody listens."""
    listens = told()
    if listens is None:
        return None
    facts = _facts(program)
    _write(listens[1], {"event": "found", **facts})
    return Found(listens[1], facts, time.perf_counter())


@contextlib.contextmanager
def finishing(program: Found | None, only_failures: bool = False) -> Iterator[None]:
    """Around the end of a program's compilation, on any thread: tells what became of it."""
    if program is None:
        yield
        return
    folder, facts, started = program
    misses = metrics.MISSES.of_thread
    try:
        yield
    except BaseException as error:
        text = f"{type(error).__name__}: {error}".splitlines()[0][:500]
        _write(folder, {"event": "failed", **facts, "seconds": time.perf_counter() - started, "error": text})
        raise
    if not only_failures:
        cached = metrics.MISSES.of_thread == misses
        _write(folder, {"event": "compiled", **facts, "seconds": time.perf_counter() - started, "cached": cached})


def zeros(program: Any) -> list[Any]:
    """What a program's ports would give, full of zeros. Made on the host where that is possible: a program that fills them would be one more in the cache."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from torch_bridge.mesh import world

    results = []
    for out in program.spec.abstract_results():
        place = None if program.spec.labels is None else out.sharding
        results.append(
            jax.device_put(np.zeros(out.shape, out.dtype), place) if world.is_local() else jnp.zeros(out.shape, out.dtype, device=place)
        )
    return results


def _facts(program: Any) -> dict[str, Any]:
    """What a graph is: the same in every process that meets the same graphs in the same order. number: how many of that name came before."""
    from torch_bridge.telemetry import activity

    graph = activity.describe(program)
    number = _names[graph.name]
    _names[graph.name] += 1
    return {"graph": graph.name, "number": number, "ops": graph.ops, "source": graph.source}


def _write(folder: pathlib.Path, event: dict[str, Any]) -> None:
    with _writing, (folder / f"{os.getpid()}.jsonl").open("a") as file:
        file.write(json.dumps(event) + "\n")
