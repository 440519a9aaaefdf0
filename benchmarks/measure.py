"""The measuring loop that every variant of the step benchmark runs in its own process. Prints one line of JSON."""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

BATCH, SEQ, VOCAB = 4, 128, 256
LAYERS, HIDDEN, INTERMEDIATE, HEADS = 8, 256, 688, 8
LEARNING_RATE = 1e-3
DECAY = 0.01  # the learning rate of step k is LEARNING_RATE / (1 + DECAY * k): it differs in every step
CHUNKS = 5  # measurements of each kind per process
CHECKED_STEPS = 10  # the losses of these steps are compared between the variants


@dataclass
class Variant:
    """What a variant does.

    `dispatch(ids)` starts one training step on int64 ids of shape (BATCH, SEQ) and returns a handle without waiting; `read(handle)`
    waits and returns the loss. `counters` returns cumulative numbers, such as compilations; `versions` names the packages that matter.
    """

    dispatch: Callable[[np.ndarray], Any]
    read: Callable[[Any], float]
    versions: dict[str, str]
    counters: Callable[[], dict[str, float]] = dict
    recording: list[float] = field(default_factory=list)  # seconds of Python work per step, where a variant records lazily


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser()
    result.add_argument("--weights", type=Path, required=True, help="npz file with the initial weights, made by torch_step.py --prepare")
    result.add_argument("--steps", type=int, default=20, help="steps per measurement")
    return result


def versions_of(names: Iterable[str]) -> dict[str, str]:
    from importlib.metadata import version

    return {name: version(name) for name in names}


def resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def batches(count: int = 16) -> list[np.ndarray]:
    generator = np.random.default_rng(0)
    return [generator.integers(0, VOCAB, (BATCH, SEQ), dtype=np.int64) for _ in range(count)]


def measure(make: Callable[[dict[str, np.ndarray]], Variant], args: argparse.Namespace) -> None:
    """Build the variant from the initial weights, time it and print the results as JSON."""
    after_import = resident_mib()
    variant = make(dict(np.load(args.weights)))
    data = batches()

    early, losses = [], []
    for i in range(CHECKED_STEPS):
        start = time.perf_counter()
        losses.append(variant.read(variant.dispatch(data[i % len(data)])))
        early.append(time.perf_counter() - start)
    warm = variant.counters()
    variant.recording.clear()

    # Waiting and not waiting take turns, so that a busy machine disturbs both alike.
    chunk = max(args.steps // CHUNKS, 1)
    synced, free, cpu, alone, beside = [], [], [], [], []
    for _ in range(CHUNKS):
        for i in range(chunk):
            start = time.perf_counter()
            variant.read(variant.dispatch(data[i % len(data)]))
            synced.append(time.perf_counter() - start)
        alone += variant.recording
        variant.recording.clear()
        start, cpu_start = time.perf_counter(), time.process_time()
        for i in range(chunk):
            handle = variant.dispatch(data[i % len(data)])
        variant.read(handle)
        free.append((time.perf_counter() - start) / chunk)
        cpu.append((time.process_time() - cpu_start) / chunk)
        beside += variant.recording
        variant.recording.clear()

    counted = variant.counters()
    result = {
        "first_step_s": early[0],
        "first_three_steps_s": sum(early[:3]),
        "step_synced_ms": 1e3 * statistics.median(synced),
        "step_free_ms": 1e3 * statistics.median(free),
        "step_cpu_ms": 1e3 * statistics.median(cpu),
        "losses": losses,
        "peak_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "rss_after_import_mib": after_import,
        "counters": counted,
        "steady_counters_per_step": {name: (counted[name] - warm[name]) / (2 * CHUNKS * chunk) for name in counted},
        "recording_alone_ms": 1e3 * statistics.median(alone) if alone else None,
        "recording_beside_ms": 1e3 * statistics.median(beside) if beside else None,
        "versions": variant.versions,
    }
    print(json.dumps(result), flush=True)


def count_jax_compilations() -> Callable[[], int]:
    """Start counting; the returned function gives the number of XLA compilations in this process so far."""
    import jax

    compiled: list[float] = []

    def listen(event: str, duration: float, **_: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(duration)

    jax.monitoring.register_event_duration_secs_listener(listen)
    return lambda: len(compiled)
