"""Processes that run cases one at a time: one that crashes or hangs costs its case a row, and is replaced."""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress

from tests.opinfo.table import Row

Case = tuple[str, str, str]
"""A database, the name of an entry of it, and a case of that."""


class Worker:
    """A process that reads cases from its standard input and answers each with a line that is its row."""

    def __init__(self, command: Sequence[str]):
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._late = False

    def run(self, case: Case, seconds: float) -> Row:
        """The case's row; if the process dies or takes longer than `seconds`, a row that says so, and then it is not `alive`."""
        timer = threading.Timer(seconds, self._kill)
        timer.start()
        with suppress(BrokenPipeError):
            self._process.stdin.write("\t".join(case) + "\n")  # type: ignore[union-attr]
            self._process.stdin.flush()  # type: ignore[union-attr]
        for line in self._process.stdout:  # type: ignore[union-attr]
            row = Row.parse(line)
            if row is not None:
                timer.cancel()
                return row
        timer.cancel()
        code = self._process.wait()
        return Row(*case, "fail", f"killed after {seconds:g} seconds" if self._late else f"the process died with exit status {code}")

    def _kill(self) -> None:
        self._late = True
        self._process.kill()

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        """Ask the process to end, and wait."""
        with suppress(BrokenPipeError):
            self._process.stdin.close()  # type: ignore[union-attr]
        self._process.stdout.close()  # type: ignore[union-attr]
        self._process.wait()


def run(cases: Iterable[Case], jobs: int, seconds: float, command: Sequence[str]) -> Iterator[Row]:
    """The rows of all cases as they come, from `jobs` processes."""
    todo: queue.SimpleQueue[Case] = queue.SimpleQueue()
    for case in cases:
        todo.put(case)
    rows: queue.SimpleQueue[Row | None] = queue.SimpleQueue()
    threads = [threading.Thread(target=_feed, args=(todo, rows.put, seconds, command), daemon=True) for _ in range(jobs)]
    for thread in threads:
        thread.start()
    running = jobs
    while running:
        row = rows.get()
        if row is None:
            running -= 1
        else:
            yield row


def _feed(todo: queue.SimpleQueue[Case], put: Callable[[Row | None], None], seconds: float, command: Sequence[str]) -> None:
    worker = Worker(command)
    try:
        while True:
            try:
                case = todo.get_nowait()
            except queue.Empty:
                return
            if not worker.alive:
                worker.close()
                worker = Worker(command)
            put(worker.run(case, seconds))
    finally:
        put(None)
        worker.close()


def serve(answer: Callable[[Case], Row]) -> None:
    """Be a worker: answer each case on standard input with its row. What else the process prints goes to standard error."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        database, name, case = line.rstrip("\n").split("\t")
        out.write(f"{answer((database, name, case))}\n")
        out.flush()
