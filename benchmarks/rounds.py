"""Running a benchmark's variants in turn, each in a process of its own, and putting the table into the README."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
README = HERE / "README.md"
WARM = 20
"""Steps before those that are timed, in every variant: of a plain script's modules some ten are recorded op by op, looked at and recorded again; later ones
are played."""


def run(script: str, variants: Iterable[str], count: int, options: Sequence[str], key: str) -> dict[str, list[dict[str, Any]]]:
    """`count` rounds of `script --variant <name> <options>`, whose last line of output is JSON. key: of the seconds to report on the way."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in variants}
    path = os.pathsep.join([str(HERE.parent), str(HERE.parent / "aliases")])
    env = {k: v for k, v in os.environ.items() if k != "JAX_COMPILATION_CACHE_DIR"} | {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu"}
    for k in range(count):
        for name, runs in found.items():
            done = subprocess.run([sys.executable, script, "--variant", name, *options], env=env, capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(f"{name} failed:\n{done.stderr[-3000:]}")
            runs.append(json.loads(done.stdout.splitlines()[-1]))
            sys.stderr.write(f"round {k + 1}: {name:9} {1e3 * runs[-1][key]:.0f} ms per step\n")
    return found


def difference(found: dict[str, list[dict[str, Any]]], most: float) -> float:
    """The largest difference between the variants' losses. Raises RuntimeError if it is more than `most`."""
    worst = max(
        abs(a - b) for runs in zip(*found.values(), strict=True) for r in runs for a, b in zip(runs[0]["losses"], r["losses"], strict=True)
    )
    if worst > most:
        raise RuntimeError(f"the variants' losses differ by {worst}")
    return worst


STEP_COLUMNS = {"median": "step, median (ms)", "mean": "step, mean (ms)", "cpu": "CPU time of a step, all threads (ms)"}


def cell(runs: Sequence[Mapping[str, Any]], peer: Sequence[Mapping[str, Any]], key: str, unit: float = 1e3, digits: int = 0) -> str:
    """A cell of a table: the median of rounds, and in brackets that of their ratios to another variant's."""
    return f"{unit * statistics.median(r[key] for r in runs):.{digits}f} ({ratio(runs, peer, key):.2f}x)"


def ratio(runs: Sequence[Mapping[str, Any]], peer: Sequence[Mapping[str, Any]], key: str) -> float:
    """The median of rounds' ratios to another variant's."""
    return statistics.median(a[key] / b[key] for a, b in zip(runs, peer, strict=True))


def against(base: str, found: dict[str, list[dict[str, Any]]], titles: Mapping[str, str]) -> list[str]:
    """Rows of a Markdown table: medians of rounds of each variant, in brackets the median of their ratios to the variant `base`."""
    lines = [f"| variant | {' | '.join(STEP_COLUMNS.values())} |", "|---" * (len(STEP_COLUMNS) + 1) + "|"]
    for name, title in titles.items():
        cells = [cell(found[name], found[base], key) for key in STEP_COLUMNS]
        lines.append(f"| {title} | {' | '.join(cells)} |")
    return lines


def now() -> tuple[float, float]:
    """Seconds on the wall, and of all threads' processor time."""
    return time.perf_counter(), time.process_time()


def steps_of(times: Sequence[tuple[float, float]], warm: int) -> dict[str, float]:
    """Seconds of a step behind the first `warm` ones, of (wall, processor) times at which steps ended."""
    took, used = ([b - a for a, b in zip(at[warm:], at[warm + 1 :], strict=False)] for at in zip(*times, strict=True))
    return {"mean": statistics.mean(took), "median": statistics.median(took), "cpu": statistics.median(used)}


def stack(*packages: str) -> str:
    """Versions, machine and day."""
    versions = ", ".join(f"{p} {importlib.metadata.version(p)}" for p in packages)
    return f"{versions}; {os.cpu_count()} cores, Python {platform.python_version()}, {datetime.date.today().isoformat()}"


def put(name: str, text: str) -> None:
    """Replace what the README has between the marks of a table."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    page = README.read_text()
    before, rest = page.split(begin)
    README.write_text(f"{before}{begin}\n{text}\n{end}{rest.split(end)[1]}")
