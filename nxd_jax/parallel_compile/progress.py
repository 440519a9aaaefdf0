"""What the command says while the script runs and at the end."""

from __future__ import annotations

import datetime
import json
import sys
import time
from pathlib import Path
from typing import Any

from nxd_jax.parallel_compile.graphs import Graph, Graphs

NAME = "neuron_parallel_compile"
REPORT = "neuron_parallel_compile_report.json"


class Progress:
    """One line that changes, on a terminal; else a line for every graph. To standard error, as the script's own output goes to standard output."""

    def __init__(self, graphs: Graphs):
        self._graphs = graphs
        self._started = time.monotonic()
        self._status: Any = None
        if sys.stderr.isatty():
            from rich.console import Console

            self._status = Console(stderr=True).status(self._line())
            self._status.start()

    def show(self) -> None:
        """Take in what is new, and say it."""
        for event, graph in self._graphs.read():
            if event == "failed" or (self._status is None and event != "found"):
                say(_told(event, graph))
        if self._status is not None:
            self._status.update(self._line())

    def stop(self) -> None:
        """The last news."""
        self.show()
        if self._status is not None:
            self._status.stop()

    def _line(self) -> str:
        graphs = self._graphs
        seconds = time.monotonic() - self._started
        return f"{NAME}: {graphs.count()} graphs found, {graphs.count('compiled')} compiled, {graphs.count('cached')} from the cache, {seconds:.0f} s"


def say(text: str) -> None:
    """A line to standard error."""
    sys.stderr.write(f"{NAME}: {text}\n")
    sys.stderr.flush()


def _told(event: str, graph: Graph) -> str:
    what = f"graph {graph.name} ({graph.ops} ops{f', up to {graph.source}' if graph.source else ''})"
    how = {"compiled": f"compiled in {graph.seconds:.1f} s", "cached": "was in the cache"}.get(
        event, f"FAILED after {graph.seconds:.1f} s: {graph.error}"
    )
    return f"{what} {how}"


def summary(graphs: Graphs, seconds: float) -> str:
    """What there is to know at the end, a line each."""
    lines = [
        f"Total graphs: {graphs.count()}",
        f"Total successful compilations: {graphs.count('compiled', 'cached')} ({graphs.count('cached')} were in the cache)",
        f"Total failed compilations: {graphs.count('failed')}",
        f"Total seconds: {seconds:.1f}",
    ]
    if noted := graphs.count("found"):
        lines.append(f"Total graphs found and not compiled: {noted}")
    return "\n".join(lines)


def write_report(graphs: Graphs, started: float, seconds: float, folder: Path) -> Path:
    """The results as JSON in a folder (`NEURON_PARALLEL_COMPILE_DUMP_RESULTS`): a summary, one entry for each graph, start time and seconds."""
    states = [g.state in ("compiled", "cached") for g in graphs.by_name.values() if g.state != "found"]
    report = {
        "compilation_summary": {str(done).lower(): states.count(done) for done in (True, False) if done in states},
        "compilation_report": {
            g.name: {
                "status": g.state in ("compiled", "cached"),
                "retry": 0,
                "compile_time": g.seconds,
                "from_cache": g.state == "cached",
                "ops": g.ops,
                "source": g.source,
                "error": g.error,
            }
            for g in graphs.by_name.values()
        },
        "start_time": datetime.datetime.fromtimestamp(started, datetime.UTC).isoformat(),
        "compilation_time": seconds,
    }
    place = folder / REPORT
    place.write_text(json.dumps(report, indent=1) + "\n")
    return place
