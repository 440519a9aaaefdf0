"""Processes that crash or hang cost their case a row, not the run."""

from __future__ import annotations

import sys

from tests.opinfo import workers

_WORKER = """
import os, sys, time
from tests.opinfo import workers
from tests.opinfo.table import Row

def answer(case):
    print("noise of an op")
    os.write(1, b"more noise\\n")
    if case[1] == "crash":
        os.abort()
    if case[1] == "hang":
        time.sleep(60)
    return Row(*case, "pass", f"by {os.getpid()}")

workers.serve(answer)
"""


def _rows(names: list[str], jobs: int, seconds: float = 50) -> dict[str, tuple[str, str]]:
    cases = [("op", name, "float32") for name in names]
    rows = list(workers.run(cases, jobs, seconds, [sys.executable, "-c", _WORKER]))
    assert len(rows) == len(names)
    return {row.name: (row.status, row.reason) for row in rows}


def test_a_crash_is_one_row_and_the_next_case_gets_a_new_process() -> None:
    rows = _rows(["first", "crash", "second", "third"], jobs=1)
    assert rows["crash"] == ("fail", "the process died with exit status -6")
    by = {name: reason for name, (status, reason) in rows.items() if status == "pass"}
    assert set(by) == {"first", "second", "third"}
    assert by["first"] != by["second"] == by["third"]


def test_a_case_that_hangs_is_killed() -> None:
    rows = _rows(["hang", "after"], jobs=1, seconds=4)
    assert rows["hang"] == ("fail", "killed after 4 seconds")
    assert rows["after"][0] == "pass"


def test_several_processes_share_the_cases() -> None:
    rows = _rows([f"case{i}" for i in range(6)], jobs=3)
    assert {status for status, _ in rows.values()} == {"pass"}
