"""How long tests take: `python -m tests.durations RUN.xml` keeps what a run with `--junitxml=RUN.xml` measured, in `tests/durations.json`.

Without a file it prints how many cases and seconds each tier has. Seconds are those of the processor, of the test and of processes that it waited for
(`CpuTime`), so that they say something on a busy machine too; a run without them gives the time that passed. They decide the order in which workers start
files (`longest_first`) and how many cases of a function a tier has (`tiers.SECONDS`).
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from tests import tiers

FILE = tiers.TESTS / "durations.json"
PROPERTY = "cpu_seconds"
OTHERS = "others"
"""Stands for the functions of a file that take less than `LEAST` each."""
LEAST = 0.3

Taken = tuple[float, int]
"""Seconds, and how many cases took them."""

Durations = dict[str, dict[str, Taken]]
"""By file and test function."""


class CpuTime:
    """A plugin: each test in a JUnit file gets the seconds that it took of the processor, setup and teardown included."""

    def __init__(self) -> None:
        self._started = 0.0

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logstart(self) -> None:
        self._started = _cpu()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> None:
        if call.when == "teardown":
            item.user_properties.append((PROPERTY, round(_cpu() - self._started, 3)))


def _cpu() -> float:
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system


def measured(*runs: Path) -> Durations:
    """What JUnit files say: of one run of all tests, or of one for each tier."""
    found: dict[str, dict[str, Taken]] = {}
    for case in (case for run in runs for case in ElementTree.parse(run).iter("testcase")):
        file = f"{case.attrib['classname'].removeprefix('tests.').replace('.', '/')}.py"
        function = case.attrib["name"].partition("[")[0]
        own = {p.attrib["name"]: p.attrib["value"] for p in case.iter("property")}
        seconds, cases = found.setdefault(file, {}).get(function, (0.0, 0))
        found[file][function] = seconds + float(own.get(PROPERTY, case.attrib["time"])), cases + 1
    return found


def together(taken: Durations) -> Durations:
    """Rounded; functions that take little stand together."""
    found: Durations = {}
    for file, functions in sorted(taken.items()):
        kept = {name: t for name, t in sorted(functions.items()) if t[0] >= LEAST}
        small = [t for name, t in functions.items() if name not in kept]
        if small:
            kept[OTHERS] = sum(s for s, _ in small), sum(n for _, n in small)
        found[file] = {name: (round(s, 1), n) for name, (s, n) in kept.items()}
    return found


def write(taken: Durations, to: Path = FILE) -> None:
    """One line for each file."""
    lines = [f"{json.dumps(file)}: {json.dumps(functions)}" for file, functions in taken.items()]
    to.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def updated(kept: Durations, new: Durations) -> Durations:
    """What was kept, with what was measured anew: a run of the tiers has only some functions. Files that are gone are left out."""
    files = sorted({**kept, **new})
    return {file: {**kept.get(file, {}), **new.get(file, {})} for file in files if (tiers.TESTS / file).exists()}


def known(of: Path = FILE) -> Durations:
    """What was kept."""
    return json.loads(of.read_text(encoding="utf-8")) if of.exists() else {}


def by_file(items: Sequence[Any], taken: Durations) -> dict[str, float]:
    """About how many seconds collected tests take, by file: the cases of a function count alike, and a function without a number as those that take little."""
    found: dict[str, float] = {}
    for item in items:
        file, _, function = tiers.place_of(item).partition("::")
        own = taken.get(file, {})
        seconds, cases = own.get(function) or own.get(OTHERS) or (tiers.UNKNOWN, 1)
        found[file] = found.get(file, 0.0) + seconds / cases
    return found


def longest_first(items: Sequence[Any]) -> list[Any]:
    """The same tests, files that take longest first, so that no worker starts one of them when the others have nothing left."""
    seconds = by_file(items, known())
    return sorted(items, key=lambda item: (-seconds[_file(item)], _file(item)))


def _file(item: Any) -> str:
    return tiers.place_of(item).partition("::")[0]


class _Collected:
    """A plugin that keeps what was collected."""

    def __init__(self) -> None:
        self.items: list[pytest.Item] = []

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        self.items = list(items)


def table() -> list[str]:
    """Cases and seconds of each tier, then of each file in it."""
    collected = _Collected()
    with contextlib.redirect_stdout(io.StringIO()):
        pytest.main(["--collect-only", "-qq", str(tiers.TESTS)], plugins=[collected])
    selection = tiers.Selection(collected.items, known())
    few = [item for item in collected.items if item in selection.few - selection.beyond]
    found, files = [], []
    for tier in tiers.TIERS:
        ran = [item for item in few if selection.tiers[item] == tier]
        thorough = [item for item in collected.items if selection.tiers[item] == tier and not selection.runs(item, False, tier)]
        cases, seconds = Counter(map(_file, ran)), by_file(ran, known())
        found.append(f"{tier:10} {len(ran):6} cases {sum(seconds.values()):8.0f} s    and {len(thorough)} thorough cases")
        files += [
            f"{tier:10} {cases[file]:6} cases {s:8.1f} s    {file}" for file, s in sorted(seconds.items(), key=lambda entry: -entry[1])
        ]
    found.append(f"{'all':10} {len(few):6} cases, {len(collected.items)} with --all")
    return [*found, "", *files]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("runs", nargs="*", type=Path, metavar="run", help="JUnit files of runs; what they did not run keeps its numbers")
    parser.add_argument("--scale", type=float, default=1.0, help="multiply its seconds, those of a run on a busy machine, say")
    asked = parser.parse_args()
    if asked.runs:
        new = {file: {name: (s * asked.scale, n) for name, (s, n) in own.items()} for file, own in measured(*asked.runs).items()}
        write(updated(known(), together(new)))
    else:
        sys.stdout.write("\n".join(table()) + "\n")


if __name__ == "__main__":
    main()
